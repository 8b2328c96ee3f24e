"""The transforms against PIL's steps one by one."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from flow_train.data.transforms import (
    IMAGENET,
    IMAGENET_MEAN,
    IMAGENET_STD,
    EvalTransform,
    Normalization,
    TrainTransform,
    random_crop_box,
)


def photo(height: int, width: int, scales: tuple[int, ...] = (4, 16, 64)) -> Image.Image:
    """An image with structure at several scales."""
    rng = np.random.default_rng(0)
    pixels = np.zeros((height, width, 3))
    for scale in scales:
        noise = Image.fromarray(rng.integers(0, 256, (scale, scale, 3), dtype=np.uint8))
        pixels += np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray((pixels / len(scales)).astype(np.uint8))


# (image height, width, image size) -> (resized height, width, top, left), what torchvision's
# Resize(round(size * 256 / 224)) and CenterCrop(size) do: the longer side is cut down to a whole
# number, the offset is rounded half to even.
GEOMETRY = [
    ((300, 400, 224), (256, 341, 16, 58)),
    ((100, 53, 224), (483, 256, 130, 16)),
    ((97, 61, 96), (174, 110, 39, 7)),
    ((500, 375, 160), (244, 183, 42, 12)),
]


def normalized(image: Image.Image) -> np.ndarray:
    return (np.asarray(image) / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)


@pytest.mark.parametrize(("given", "expected"), GEOMETRY)
def test_eval_transform_is_resize_and_center_crop(given, expected):
    height, width, size = given
    resized_height, resized_width, top, left = expected
    image = photo(height, width)
    resized = image.resize((resized_width, resized_height), Image.Resampling.BILINEAR)
    actual = EvalTransform(size)(image, np.random.default_rng(0))
    assert (actual.shape, actual.dtype) == ((size, size, 3), np.float32)
    reference = normalized(resized.crop((left, top, left + size, top + size)))
    np.testing.assert_allclose(actual, reference, atol=1e-5)


def test_crop_boxes_have_the_stated_distribution():
    rng = np.random.default_rng(0)
    boxes = np.array([random_crop_box(400, 300, rng) for _ in range(4000)])
    left, top, width, height = boxes.T
    # All corners are reached, and no more.
    assert (left.min(), top.min(), (left + width).max(), (top + height).max()) == (0, 0, 400, 300)
    share = width * height / (400 * 300)
    assert share.min() > 0.075
    assert share.max() <= 1
    aspect = width / height
    assert aspect.min() > 0.73
    assert aspect.max() < 1.36
    assert abs(np.log(aspect).mean()) < 0.05


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1000, 10), (493, 0, 13, 10)), ((10, 1000), (0, 493, 10, 13)), ((1, 1), (0, 0, 1, 1))],
)
def test_crop_of_extreme_shapes_is_central(size, expected):
    assert random_crop_box(*size, np.random.default_rng(0)) == expected


def test_train_transform_is_resized_crop_and_flip():
    image = photo(40, 40)
    expected = normalized(image.resize((24, 24), Image.Resampling.BILINEAR))
    for hflip, wanted in ((0.0, expected), (1.0, expected[:, ::-1])):
        # Only square crops of the whole image fit, or the central one: nothing is left to chance.
        transform = TrainTransform(24, scale=(1.0, 1.0), hflip=hflip)
        for seed in range(4):
            np.testing.assert_allclose(
                transform(image, np.random.default_rng(seed)), wanted, atol=1e-5
            )


def encode(image: Image.Image, form: str, **options: object) -> Image.Image:
    data = io.BytesIO()
    image.save(data, form, **options)
    return Image.open(data)


@pytest.mark.parametrize("gray", [False, True])
def test_large_jpeg_is_decoded_small_and_looks_the_same(gray):
    """Decoding at a part of the size shows the same crop, not one that is shifted or scaled."""
    original = photo(801, 1203, scales=(4, 16))
    transform = TrainTransform(
        32, normalization=Normalization((0.45,), (0.25,)) if gray else IMAGENET
    )
    differences, shrunk = [], 0
    for seed in range(8):
        jpeg = encode(original, "JPEG", quality=95)
        reduced = transform(jpeg, np.random.default_rng(seed))
        shrunk += jpeg.size != original.size
        decoded = encode(original, "JPEG", quality=95).convert("RGB")
        full = transform(decoded, np.random.default_rng(seed))
        differences.append(np.abs(reduced - full).mean())
    assert shrunk > 4
    assert max(differences) < 0.05


@pytest.mark.parametrize(
    ("mode", "form"), [("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG")]
)
def test_other_modes_become_rgb(mode, form):
    image = photo(50, 70, scales=(4,)).convert(mode)
    for transform in (TrainTransform(32), EvalTransform(32)):
        assert transform(encode(image, form), np.random.default_rng(0)).shape == (32, 32, 3)
    expected = np.asarray(image.convert("RGB"), dtype=np.float64)
    actual = np.asarray(IMAGENET.decode(encode(image, form)), dtype=np.float64)
    assert np.abs(actual - expected).mean() < 4


def test_sixteen_bit_gray_keeps_its_range():
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    stored = encode(Image.fromarray(ramp), "PNG")
    assert stored.mode.startswith("I")
    np.testing.assert_array_equal(np.asarray(IMAGENET.decode(stored)), np.dstack([ramp >> 8] * 3))
    # Values that are no numbers are black.
    values = np.array([[0.0, np.nan], [-1.0, 1.0]], np.float32)
    found = np.asarray(IMAGENET.decode(Image.fromarray(values)))[:, :, 0]
    assert found.tolist() == [[0, 0], [0, 255]]


@pytest.mark.parametrize(
    ("white", "dtype"),
    [(1.0, "f4"), (255.0, "f4"), (65535.0, "f4"), (65535, "i4"), (2**31 - 1, "i4")],
)
def test_thirty_two_bit_gray_keeps_its_range(white, dtype):
    """A TIFF says nothing of what is white."""
    gray = np.linspace(0, 1, 256).reshape(16, 16)
    with encode(Image.fromarray((gray * white).astype(dtype)), "TIFF") as image:
        assert image.mode == ("F" if dtype == "f4" else "I")
        pixels = np.asarray(IMAGENET.decode(image))
    assert np.abs(pixels - (gray * 255)[:, :, None]).max() <= 1


def test_exif_orientation_is_ignored():
    image = photo(40, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encode(image, "JPEG"), encode(image, "JPEG", exif=exif)
    assert turned.getexif()[0x0112] == 6
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(EvalTransform(32)(turned, rng), EvalTransform(32)(plain, rng))


def test_truncated_jpeg_is_an_error():
    data = io.BytesIO()
    photo(400, 400).save(data, "JPEG", quality=90)
    cut = data.getvalue()[: len(data.getvalue()) * 6 // 10]
    for transform in (TrainTransform(32), EvalTransform(32)):
        with pytest.raises(OSError, match="truncated"):
            transform(Image.open(io.BytesIO(cut)), np.random.default_rng(0))
