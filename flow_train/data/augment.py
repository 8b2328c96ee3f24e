"""Transforms from their configuration, with the keys of timm's create_transform."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from PIL import Image, ImageOps

from flow_train.config.checked import checked_options
from flow_train.data.color_jitter import ColorJitter
from flow_train.data.rand_augment import parse_rand_augment
from flow_train.data.random_erasing import MODES as ERASING_MODES
from flow_train.data.random_erasing import RandomErasing
from flow_train.data.transforms import (
    DEFAULT_RATIO,
    DEFAULT_SCALE,
    AugmentArray,
    AugmentImage,
    EvalTransform,
    Normalization,
    PlainTransform,
    TrainTransform,
    Transform,
    finish_training,
)

DEFAULT_CROP_PCT = 0.875
_Types = dict[str, Callable[[Any], Any]]
_INTERPOLATIONS = {resampling.name.lower(): resampling for resampling in Image.Resampling}


class PadCropTransform:
    """Pads with black, crops at random and flips: the usual shifts of small images.

    Args:
        image_size: height and width of the images before and after.
        padding: pixels on every side, the most that an image is shifted by.
        hflip: probability of the flip.
        normalization: also decides between color and gray.
        augment: what happens to the image after crop and flip.
        erase: what happens to the normalized array at last.
    """

    def __init__(
        self,
        image_size: int,
        padding: int,
        hflip: float,
        normalization: Normalization,
        *,
        augment: AugmentImage | None = None,
        erase: AugmentArray | None = None,
    ) -> None:
        self.image_size = image_size
        self.padding = padding
        self.hflip = hflip
        self.normalization = normalization
        self.augment = augment
        self.erase = erase

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """Returns: float32 array of shape (image_size, image_size, channels)."""
        size = self.image_size
        image = self.normalization.decode(image)
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BICUBIC)
        left, top = (int(shift) for shift in rng.integers(2 * self.padding + 1, size=2))
        flip = rng.random() < self.hflip
        image = ImageOps.expand(image, self.padding).crop((left, top, left + size, top + size))
        return finish_training(
            image, flip, rng, self.normalization, augment=self.augment, erase=self.erase
        )


def build_train_transform(
    image_size: int,
    normalization: Normalization,
    config: Mapping[str, Any] | None = None,
    *,
    exact_size: bool = False,
) -> Transform:
    """The transform of training images.

    Args:
        image_size: height and width of the result.
        normalization: also decides between color and gray.
        config: None for a random resized crop and flips. Keys: `scale` and `ratio` of the crop;
            `hflip` (0.5); `interpolation` (bilinear, bicubic, ..., or random, which draws one of
            these two per image); `auto_augment` (such as rand-m9-mstd0.5-inc1); `color_jitter`
            (one, three or four strengths; none by default, and none beside `auto_augment`);
            `re_prob` (0), `re_mode` (const, rand, pixel) and `re_count` (1) of random erasing;
            `pad`, to shift by up to that many pixels instead of the resized crop; `no_aug`, to do
            as in evaluation. `_target_`, `is_training` and `input_size` may be there and do
            nothing.
        exact_size: the data set's images have that size already.

    Raises:
        UserError: an unknown key or a wrong value.
    """
    types: _Types = {
        "no_aug": bool,
        "scale": _range,
        "ratio": _range,
        "hflip": _probability,
        "interpolation": _interpolation,
        "auto_augment": str,
        "color_jitter": _strengths,
        "re_prob": _probability,
        "re_mode": _erasing_mode,
        "re_count": int,
        "pad": int,
    }
    options = _options(config, types, "train_transforms")
    if options.get("no_aug"):
        return build_eval_transform(
            image_size, normalization, {"crop_pct": 1.0}, exact_size=exact_size
        )
    interpolation = options.get("interpolation", Image.Resampling.BILINEAR)
    steps: dict[str, Any] = {
        "augment": _augmentation(options, normalization, interpolation),
        "erase": None,
    }
    if options.get("re_prob", 0) > 0:
        count = options.get("re_count", 1)
        if count < 1:
            raise UserError(f"train_transforms: re_count is {count}; it has to be at least 1")
        steps["erase"] = RandomErasing(options["re_prob"], options.get("re_mode", "const"), count)
    hflip = options.get("hflip", 0.5)
    if "pad" in options:
        if options["pad"] < 0:
            raise UserError(f"train_transforms: pad is {options['pad']}; it has to be 0 or more")
        return PadCropTransform(image_size, options["pad"], hflip, normalization, **steps)
    scale, ratio = options.get("scale", DEFAULT_SCALE), options.get("ratio", DEFAULT_RATIO)
    # The whole of a square image is the only crop that has all of its area.
    crops = scale != (1.0, 1.0) or not ratio[0] <= 1 <= ratio[1]
    if exact_size and not crops and hflip == 0 and not any(steps.values()):
        return PlainTransform(normalization)
    return TrainTransform(
        image_size,
        scale,
        hflip,
        ratio=ratio,
        interpolation=interpolation,
        normalization=normalization,
        **steps,
    )


def build_eval_transform(
    image_size: int,
    normalization: Normalization,
    config: Mapping[str, Any] | None = None,
    *,
    exact_size: bool = False,
    name: str = "val_transforms",
) -> Transform:
    """The transform of validation and test images.

    Args:
        image_size: height and width of the result.
        normalization: also decides between color and gray.
        config: keys `crop_pct` (0.875): the shorter side becomes `floor(image_size / crop_pct)`,
            then the center is cropped; `resize_size` to give that side itself; `interpolation`
            (bilinear). `_target_`, `is_training` and `input_size` may be there and do nothing.
        exact_size: the data set's images have that size already: without a config they are only
            normalized.
        name: of the config, for messages.

    Raises:
        UserError: an unknown key or a wrong value.
    """
    types: _Types = {"crop_pct": float, "resize_size": int, "interpolation": _fixed_interpolation}
    options = _options(config, types, name)
    crop_pct = options.get("crop_pct", DEFAULT_CROP_PCT)
    if not 0 < crop_pct <= 1:
        raise UserError(f"{name}: crop_pct is {crop_pct}; it has to be above 0 and at most 1")
    resize_size = options.get("resize_size", math.floor(image_size / crop_pct))
    if resize_size < image_size:
        raise UserError(
            f"{name}: resize_size is {resize_size}, below the image size {image_size}; nothing "
            "could be cropped from that"
        )
    if exact_size and (not options or resize_size == image_size):
        return PlainTransform(normalization)
    return EvalTransform(
        image_size,
        resize_size=resize_size,
        interpolation=options.get("interpolation", Image.Resampling.BILINEAR),
        normalization=normalization,
    )


def _augmentation(
    options: Mapping[str, Any],
    normalization: Normalization,
    interpolation: Image.Resampling | None,
) -> AugmentImage | None:
    if options.get("auto_augment"):
        policy = parse_rand_augment(options["auto_augment"])
        return replace(policy, fill=normalization.mean_color, interpolation=interpolation)
    return ColorJitter(options["color_jitter"]) if "color_jitter" in options else None


def _options(
    config: Mapping[str, Any] | None, types: Mapping[str, Callable[[Any], Any]], name: str
) -> dict[str, Any]:
    return checked_options(config or {}, types, what=name, ignored=("is_training", "input_size"))


def _range(value: Any) -> tuple[float, float]:
    low, high = (float(bound) for bound in value)
    if not 0 < low <= high:
        raise ValueError("expected two positive numbers, the smaller first")
    return low, high


def _probability(value: Any) -> float:
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError("expected a probability, 0 to 1")
    return number


def _strengths(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        strengths: float | tuple[float, ...] = tuple(float(strength) for strength in value)
    else:
        strengths = float(value)
    ColorJitter(strengths)
    return strengths


def _erasing_mode(value: Any) -> str:
    if value not in ERASING_MODES:
        raise ValueError(f"expected one of {', '.join(ERASING_MODES)}")
    return str(value)


def _interpolation(value: Any) -> Image.Resampling | None:
    return None if value == "random" else _fixed_interpolation(value)


def _fixed_interpolation(value: Any) -> Image.Resampling:
    if value not in _INTERPOLATIONS:
        raise ValueError(f"expected one of {', '.join(_INTERPOLATIONS)}")
    return _INTERPOLATIONS[value]
