"""Transforms from their configuration, and color jitter."""

from __future__ import annotations

import colorsys
import io

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from flow_train.data.augment import (
    ColorJitter,
    PadCropTransform,
    build_eval_transform,
    build_train_transform,
    turn_hue,
)
from flow_train.data.rand_augment import parse_rand_augment
from flow_train.data.transforms import (
    IMAGENET,
    IMAGENET_MEAN,
    IMAGENET_STD,
    EvalTransform,
    Normalization,
    PlainTransform,
    TrainTransform,
)

GRAY = Normalization((0.45,), (0.25,))


def photo(width: int = 60, height: int = 44, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def normalized(image: Image.Image) -> np.ndarray:
    return (np.asarray(image) / 255.0 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# image size, crop_pct -> size of the shorter side: the upstream runs' values (monarch_spec.md 4.6).
@pytest.mark.parametrize(
    ("size", "crop_pct", "shorter"), [(224, 0.9, 248), (224, 0.875, 256), (28, 1.0, 28)]
)
def test_evaluation_resizes_the_shorter_side_and_crops_the_center(size, crop_pct, shorter):
    image = photo(320, 270)
    transform = build_eval_transform(
        size, IMAGENET, {"crop_pct": crop_pct, "interpolation": "bicubic"}
    )
    resized = image.resize((int(shorter * 320 / 270), shorter), Image.Resampling.BICUBIC)
    left, top = round((resized.width - size) / 2), round((shorter - size) / 2)
    expected = normalized(resized.crop((left, top, left + size, top + size)))
    np.testing.assert_allclose(transform(image, rng()), expected, atol=1e-5)


def test_defaults_are_those_without_a_configuration():
    image = photo(300, 260)
    ours = build_eval_transform(224, IMAGENET)(image, rng())
    bicubic = EvalTransform(224, interpolation=Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(ours, bicubic(image, rng()))
    train = build_train_transform(32, IMAGENET)
    expected = TrainTransform(32, (0.08, 1.0), 0.5, interpolation=None)
    for seed in range(4):
        np.testing.assert_array_equal(train(image, rng(seed)), expected(image, rng(seed)))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "I;16"])
def test_gray_and_color_from_any_mode(mode):
    image = photo(mode="RGB" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    for normalization in (GRAY, IMAGENET):
        shape = (24, 24, normalization.channels)
        config = {"auto_augment": "rand-m9-n3-p1", "re_prob": 1.0, "re_mode": "pixel"}
        for transform in (
            build_train_transform(24, normalization, config),
            build_train_transform(24, normalization, {"color_jitter": [0.4, 0.4, 0.4, 0.1]}),
            build_train_transform(24, normalization, {"pad": 3}),
            build_eval_transform(24, normalization),
        ):
            array = transform(image, rng())
            assert (array.shape, array.dtype) == (shape, np.float32)
            assert np.isfinite(array).all()


def test_gray_is_luma():
    image = photo(24, 24)
    array = build_eval_transform(24, GRAY, {"crop_pct": 1.0}, exact_size=True)(image, rng())
    luma = np.asarray(image) @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(array[:, :, 0] * 0.25 + 0.45, luma / 255, atol=1.01 / 255)


def test_random_interpolation_is_either():
    image = photo()
    fixed = [
        build_train_transform(24, IMAGENET, {"interpolation": name, "scale": [1, 1], "hflip": 0})
        for name in ("bilinear", "bicubic")
    ]
    random = build_train_transform(
        24, IMAGENET, {"interpolation": "random", "scale": [1, 1], "hflip": 0}
    )
    seen = set()
    for seed in range(20):
        array = random(image, rng(seed))
        matches = [
            name
            for name, transform in zip(("bilinear", "bicubic"), fixed, strict=True)
            if (array == transform(image, rng(seed))).all()
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == {"bilinear", "bicubic"}


def test_augmentation_fills_with_the_mean_and_erasing_comes_last():
    config = {
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "scale": [1.0, 1.0],
        "hflip": 0.0,
        "interpolation": "bilinear",
    }
    transform = build_train_transform(24, IMAGENET, config)
    assert isinstance(transform, TrainTransform)
    policy = parse_rand_augment("rand-m9-mstd0.5-inc1")
    assert transform.augment.fill == (124, 116, 104)
    assert transform.augment.interpolation == Image.Resampling.BILINEAR
    assert transform.augment.n == policy.n
    # Const erasing leaves zeros, whatever the normalization is.
    erases = build_train_transform(24, IMAGENET, {**config, "re_prob": 1.0, "re_mode": "const"})
    zeros = [(erases(photo(24, 24), rng(seed)) == 0).all(axis=2).sum() for seed in range(20)]
    assert min(zeros) >= 0.02 * 576 / 2
    assert max(zeros) <= 0.36 * 576


def test_flip_comes_with_its_probability():
    image = photo(24, 24)
    upright = normalized(image)
    for p in (0.0, 1.0, 0.5):
        transform = build_train_transform(24, IMAGENET, {"scale": [1, 1], "hflip": p})
        flips = 0
        for seed in range(200):
            array = transform(image, rng(seed))
            flipped = np.abs(array - upright[:, ::-1]).max() < 1e-5
            assert flipped or np.abs(array - upright).max() < 1e-5
            flips += flipped
        assert flips / 200 == pytest.approx(p, abs=0.15)
        assert flips == 200 * p or p == 0.5


def test_pad_shifts_by_up_to_that_many_pixels():
    image = photo(24, 24)
    transform = build_train_transform(24, IMAGENET, {"pad": 2, "hflip": 0.0})
    assert isinstance(transform, PadCropTransform)
    black = np.zeros((28, 28, 3), dtype=np.uint8)
    black[2:26, 2:26] = np.asarray(image)
    shifts = set()
    for seed in range(200):
        array = transform(image, rng(seed))
        found = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.abs(array - normalized(black[top : top + 24, left : left + 24])).max() < 1e-5
        ]
        assert len(found) == 1
        shifts.update(found)
    assert len(shifts) == 25


def test_images_of_the_right_size_are_only_normalized_where_nothing_else_is_asked_for():
    for config in (
        {"no_aug": True},
        {"scale": [1.0, 1.0], "hflip": 0.0},
        {"scale": [1.0, 1.0], "ratio": [0.75, 1.33], "hflip": 0.0, "interpolation": "random"},
    ):
        transform = build_train_transform(24, IMAGENET, config, exact_size=True)
        assert isinstance(transform, PlainTransform)
        np.testing.assert_allclose(
            transform(photo(24, 24), rng()), normalized(photo(24, 24)), atol=1e-5
        )
    for config in ({"hflip": 0.0}, {"scale": [1, 1], "hflip": 0.1}, {"pad": 1}):
        transform = build_train_transform(24, IMAGENET, config, exact_size=True)
        assert not isinstance(transform, PlainTransform)
    assert isinstance(build_eval_transform(24, IMAGENET, exact_size=True), PlainTransform)
    kept = build_eval_transform(24, IMAGENET, {"crop_pct": 0.875}, exact_size=True)
    assert kept.resize_size == 27


def test_large_jpegs_are_reduced_while_decoding_in_gray_too():
    buffer = io.BytesIO()
    photo(640, 480).save(buffer, "JPEG", quality=95)
    for normalization in (IMAGENET, GRAY):
        transform = build_train_transform(32, normalization, {"scale": [1, 1], "hflip": 0})
        reduced = transform(Image.open(buffer), rng())
        full = transform(Image.open(buffer).convert("RGB"), rng())
        assert np.abs(reduced - full).mean() < 0.05


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"auto_aug": "rand-m9"}, r"auto_aug; did you mean train_transforms\.auto_augment"),
        ({"auto_augment": "augmix-m3"}, "auto_augment 'augmix-m3' is not known"),
        ({"interpolation": "cubic"}, "interpolation='cubic': it must be .*bicubic"),
        ({"scale": [1.0, 0.5]}, "scale: .*the smaller first"),
        ({"scale": 0.5}, "scale=0.5"),
        ({"hflip": 2}, "hflip=2: it must be a number from 0 to 1"),
        ({"re_prob": 0.5, "re_mode": "noise"}, "re_mode='noise': it must be pixel, rand or const"),
        ({"re_prob": 0.5, "re_count": 0}, "re_count=0"),
        ({"pad": -1}, "pad=-1"),
        ({"color_jitter": [0.4, 0.4]}, "color_jitter=.* a list of values"),
        ({"no_aug": 1}, "no_aug=1: it must be true or false"),
    ],
)
def test_wrong_training_options_are_named(config, message):
    with pytest.raises(UserError, match=message) as caught:
        build_train_transform(24, IMAGENET, config)
    assert "auto_augment" in str(caught.value) or "train_transforms" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"crop_pct": 1.1}, "crop_pct=1.1"),
        ({"resize_size": 20}, "resize_size is 20, below the image size 24"),
        ({"interpolation": "random"}, "interpolation='random'"),
        ({"hflip": 0.5}, r"no key test_transforms\.hflip"),
    ],
)
def test_wrong_evaluation_options_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_eval_transform(24, IMAGENET, config, name="test_transforms")


def test_normalization_checks_its_numbers():
    for mean, std in (((0.5, 0.5), (1.0, 1.0)), ((0.5,), (1.0, 1.0)), ((0.5,), (0.0,))):
        with pytest.raises(ValueError, match=r"mean .* and std|std"):
            Normalization(mean, std)


class TestColorJitter:
    def test_strengths_are_factors(self):
        image = photo()
        for place, enhancer in enumerate((ImageEnhance.Brightness, ImageEnhance.Contrast)):
            strengths = [0.0, 0.0, 0.0]
            strengths[place] = 0.4
            jitter, factors = ColorJitter(strengths), []
            for seed in range(60):
                generator = rng(seed)
                generator.permutation(4)
                factor = generator.uniform(0.6, 1.4)
                expected = np.asarray(enhancer(image).enhance(factor))
                np.testing.assert_array_equal(np.asarray(jitter(image, rng(seed))), expected)
                factors.append(factor)
            assert max(factors) - min(factors) > 0.6

    def test_hue_turns_as_in_colorsys(self):
        image = photo(12, 12)
        for part in (-0.3, 0.1, 0.5):
            turned = np.asarray(turn_hue(image, part)).reshape(-1, 3) / 255
            for before, after in zip(np.asarray(image).reshape(-1, 3) / 255, turned, strict=True):
                h, s, v = colorsys.rgb_to_hsv(*before)
                expected = colorsys.hsv_to_rgb((h + part) % 1.0, s, v)
                # HSV has eight bits, of hue, too.
                np.testing.assert_allclose(after, expected, atol=0.05)
        gray = photo(mode="L")
        assert turn_hue(gray, 0.2) is gray

    def test_nothing_changes_without_strength(self):
        image = photo()
        assert ColorJitter(0.0)(image, rng()) is image
        with pytest.raises(ValueError, match=r"hue up to 0\.5"):
            ColorJitter([0.1, 0.1, 0.1, 0.6])
