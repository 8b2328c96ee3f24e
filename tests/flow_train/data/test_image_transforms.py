"""Transforms from their configuration, color jitter and random erasing."""

from __future__ import annotations

import colorsys
import math

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from flow_train.data.augment import (
    ColorJitter,
    RandomErasing,
    build_eval_transform,
    build_train_transform,
    turn_hue,
)
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
@pytest.mark.parametrize(("size", "crop_pct", "shorter"), [(224, 0.9, 248), (28, 1.0, 28)])
def test_evaluation_resizes_the_shorter_side(size, crop_pct, shorter):
    config = {"crop_pct": crop_pct, "interpolation": "bicubic"}
    transform = build_eval_transform(size, IMAGENET, config)
    assert (transform.image_size, transform.resize_size) == (size, shorter)
    assert transform.interpolation == Image.Resampling.BICUBIC


def test_defaults_are_those_without_a_configuration():
    image = photo(300, 260)
    ours = build_eval_transform(224, IMAGENET)(image, rng())
    bicubic = EvalTransform(224, interpolation=Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(ours, bicubic(image, rng()))
    train = build_train_transform(32, IMAGENET)
    expected = TrainTransform(32, (0.08, 1.0), 0.5, interpolation=None)
    for seed in range(4):
        np.testing.assert_array_equal(train(image, rng(seed)), expected(image, rng(seed)))


@pytest.mark.parametrize("mode", ["RGB", "P", "I;16"])
def test_gray_and_color_from_any_mode(mode):
    image = photo(mode="RGB" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    for normalization in (GRAY, IMAGENET):
        config = {"auto_augment": "rand-m9-n3-p1", "re_prob": 1.0, "re_mode": "pixel"}
        for transform in (
            build_train_transform(24, normalization, config),
            build_train_transform(24, normalization, {"color_jitter": [0.4, 0.4, 0.4, 0.1]}),
            build_train_transform(24, normalization, {"pad": 3}),
            build_eval_transform(24, normalization),
        ):
            array = transform(image, rng())
            assert (array.shape, array.dtype) == ((24, 24, normalization.channels), np.float32)
            assert np.isfinite(array).all()


def test_gray_is_luma():
    image = photo(24, 24)
    array = build_eval_transform(24, GRAY, {"crop_pct": 1.0}, exact_size=True)(image, rng())
    luma = np.asarray(image) @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(array[:, :, 0] * 0.25 + 0.45, luma / 255, atol=1.01 / 255)


def test_random_interpolation_is_either():
    image, options = photo(), {"scale": [1, 1], "hflip": 0}
    bilinear, bicubic, random = (
        build_train_transform(24, IMAGENET, {"interpolation": name, **options})
        for name in ("bilinear", "bicubic", "random")
    )
    seen = set()
    for seed in range(20):
        drawn, *fixed = (each(image, rng(seed)) for each in (random, bilinear, bicubic))
        matches = [number for number, array in enumerate(fixed) if (drawn == array).all()]
        assert len(matches) == 1
        seen.update(matches)
    assert seen == {0, 1}


def test_augmentation_fills_with_the_mean_and_erasing_comes_last():
    config = {"auto_augment": "rand-m9-mstd0.5-inc1", "scale": [1.0, 1.0], "hflip": 0.0}
    config |= {"interpolation": "bilinear", "re_prob": 1.0, "re_mode": "const"}
    transform = build_train_transform(24, IMAGENET, config)
    assert transform.augment.fill == (124, 116, 104)
    assert transform.augment.interpolation == Image.Resampling.BILINEAR
    # Const erasing leaves zeros, whatever the normalization is.
    zeros = [(transform(photo(24, 24), rng(seed)) == 0).all(axis=2).sum() for seed in range(20)]
    assert min(zeros) >= 0.02 * 576 / 2
    assert max(zeros) <= 0.36 * 576


def test_flip_comes_with_its_probability():
    image = photo(24, 24)
    upright = normalized(image)
    for p, least, most in ((0.0, 0, 0), (1.0, 100, 100), (0.5, 35, 65)):
        transform = build_train_transform(24, IMAGENET, {"scale": [1, 1], "hflip": p})
        flips = 0
        for seed in range(100):
            array = transform(image, rng(seed))
            flipped = np.abs(array - upright[:, ::-1]).max() < 1e-5
            assert flipped or np.abs(array - upright).max() < 1e-5
            flips += flipped
        assert least <= flips <= most


def test_pad_shifts_by_up_to_that_many_pixels():
    image = photo(24, 24)
    transform = build_train_transform(24, IMAGENET, {"pad": 1, "hflip": 0.0})
    black = np.zeros((26, 26, 3), dtype=np.uint8)
    black[1:25, 1:25] = np.asarray(image)
    places = [(top, left) for top in range(3) for left in range(3)]
    crops = [normalized(black[top : top + 24, left : left + 24]) for top, left in places]
    shifts = set()
    for seed in range(80):
        array = transform(image, rng(seed))
        found = [n for n, crop in enumerate(crops) if np.abs(array - crop).max() < 1e-5]
        assert len(found) == 1
        shifts.update(found)
    assert len(shifts) == 9


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ({"no_aug": True}, True),
        ({"scale": [1, 1], "ratio": [0.75, 1.33], "hflip": 0, "interpolation": "random"}, True),
        ({"hflip": 0.0}, False),
        ({"scale": [1, 1], "hflip": 0.1}, False),
        ({"pad": 1}, False),
    ],
)
def test_images_of_the_right_size_are_only_normalized_where_nothing_else_is_asked_for(
    config, plain
):
    transform = build_train_transform(24, IMAGENET, config, exact_size=True)
    assert isinstance(transform, PlainTransform) == plain
    if plain:
        image = photo(24, 24)
        np.testing.assert_allclose(transform(image, rng()), normalized(image), atol=1e-5)


def test_evaluation_of_the_right_size():
    assert isinstance(build_eval_transform(24, IMAGENET, exact_size=True), PlainTransform)
    kept = build_eval_transform(24, IMAGENET, {"crop_pct": 0.875}, exact_size=True)
    assert kept.resize_size == 27


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"auto_aug": "rand-m9"}, r"auto_aug; did you mean train_transforms\.auto_augment"),
        ({"auto_augment": "augmix-m3"}, "auto_augment 'augmix-m3' is not known"),
        ({"interpolation": "cubic"}, "train_transforms.interpolation='cubic': .*bicubic"),
        ({"scale": [1.0, 0.5]}, "train_transforms.scale: .*the smaller first"),
        ({"hflip": 2}, "train_transforms.hflip=2: it must be a number from 0 to 1"),
        ({"re_mode": "noise"}, "train_transforms.re_mode='noise': .* pixel, rand or const"),
        ({"pad": -1}, "train_transforms.pad=-1"),
        ({"color_jitter": [0.4, 0.4]}, "train_transforms.color_jitter=.* a list of values"),
    ],
)
def test_wrong_training_options_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_train_transform(24, IMAGENET, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"crop_pct": 1.1}, "crop_pct=1.1"),
        ({"resize_size": 20}, "resize_size is 20, below the image size 24"),
        ({"interpolation": "random"}, r"test_transforms\.interpolation='random'"),
    ],
)
def test_wrong_evaluation_options_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_eval_transform(24, IMAGENET, config, name="test_transforms")


def test_normalization_checks_its_numbers():
    for mean, std in (((0.5, 0.5), (1.0, 1.0)), ((0.5,), (1.0, 1.0)), ((0.5,), (0.0,))):
        with pytest.raises(ValueError, match=r"mean .* and std|std"):
            Normalization(mean, std)


def test_strengths_of_color_jitter_are_factors():
    image = photo()
    for place, enhancer in enumerate((ImageEnhance.Brightness, ImageEnhance.Contrast)):
        strengths = [0.0, 0.0, 0.0]
        strengths[place] = 0.4
        jitter, factors = ColorJitter(strengths), []
        for seed in range(40):
            generator = rng(seed)
            generator.permutation(4)
            factors.append(generator.uniform(0.6, 1.4))
            expected = np.asarray(enhancer(image).enhance(factors[-1]))
            np.testing.assert_array_equal(np.asarray(jitter(image, rng(seed))), expected)
        assert max(factors) - min(factors) > 0.6
    assert ColorJitter(0.0)(image, rng()) is image
    with pytest.raises(ValueError, match=r"hue up to 0\.5"):
        ColorJitter([0.1, 0.1, 0.1, 0.6])


def test_hue_turns_as_in_colorsys():
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


# A value that no draw gives.
MARK = 1e9


def erased(mode: str = "const", seed: int = 0, prob: float = 1.0, **options) -> np.ndarray:
    image = np.full((60, 80, 3), MARK, dtype=np.float32)
    assert RandomErasing(prob, mode, **options)(image, np.random.default_rng(seed)) is image
    return image


def box_of(image: np.ndarray) -> tuple[int, int, int, int]:
    changed = (image != MARK).any(axis=2)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    box = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    assert changed[box[0] : box[1], box[2] : box[3]].all()
    return box


def test_probability():
    draws = 2000
    hits = sum((erased(seed=seed, prob=0.25) != MARK).any() for seed in range(draws))
    assert hits / draws == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / draws))
    assert (erased(prob=0.0) == MARK).all()


def test_boxes_have_areas_and_aspects_in_range_at_any_place():
    areas, aspects, tops = [], [], []
    for seed in range(1500):
        top, bottom, left, right = box_of(erased(seed=seed))
        assert 0 <= top < bottom <= 60
        assert 0 <= left < right <= 80
        areas.append((bottom - top) * (right - left) / 4800)
        aspects.append(math.log((bottom - top) / (right - left)))
        tops.append(top / (60 - (bottom - top)))
    # Sides are rounded to whole pixels.
    assert min(areas) > 0.015
    assert max(areas) < 0.36
    # Uniform in area but for the few that do not fit; symmetric in the logarithm of the aspect.
    assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.015)
    assert max(map(abs, aspects)) < math.log(1 / 0.3) + 0.1
    assert np.mean(aspects) == pytest.approx(0, abs=0.1)
    assert np.mean(tops) == pytest.approx(0.5, abs=0.03)


def test_contents():
    top, bottom, left, right = box_of(erased("const", 1))
    assert (erased("const", 1)[top:bottom, left:right] == 0).all()
    color = erased("rand", 1)[top:bottom, left:right]
    assert (color == color[0, 0]).all()
    assert len(set(color[0, 0].tolist())) == 3
    images = [erased("pixel", seed) for seed in range(40)]
    noise = np.concatenate([image[(image != MARK).all(axis=2)] for image in images])
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert len(np.unique(noise)) > 0.9 * noise.size
    gray = np.ones((28, 28, 1), dtype=np.float32)
    assert RandomErasing(1.0, "pixel")(gray, np.random.default_rng(0)).shape == (28, 28, 1)


def test_several_boxes_share_the_area():
    covered = [(erased(seed=seed, count=4) != MARK).any(axis=2).mean() for seed in range(600)]
    # Boxes may overlap, and one that finds no place is left out.
    assert max(covered) < 0.36
    assert 0.1 < np.mean(covered) < 0.18
    assert all((erased("pixel", s, count=4) != MARK).any() for s in range(20))


@pytest.mark.parametrize(
    "options",
    [{"prob": 1.5}, {"mode": "x"}, {"count": 0}, {"area": (0.5, 0.2)}, {"aspect": (0, 1)}],
)
def test_wrong_options(options):
    with pytest.raises(ValueError, match=r"probability|area"):
        RandomErasing(**{"prob": 0.5, **options})
