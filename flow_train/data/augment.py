"""Transforms from their configuration, with the keys of timm's create_transform."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from PIL import Image, ImageOps

from flow_train.data.color_jitter import ColorJitter
from flow_train.data.rand_augment import parse_rand_augment
from flow_train.data.random_erasing import RandomErasing
from flow_train.data.transforms import (
    AugmentArray,
    AugmentImage,
    EvalTransform,
    Normalization,
    PlainTransform,
    TrainTransform,
    Transform,
    finish_training,
)

_INTERPOLATIONS = {resampling.name.lower(): resampling for resampling in Image.Resampling}


class PadCropTransform:
    """Pads with black, crops at random and flips: the usual shifts of small images. An image is
    shifted by at most `padding` pixels; `augment` comes after crop and flip, `erase` changes the
    normalized array at last. The normalization decides between color and gray."""

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
        """A float32 array of shape (image_size, image_size, channels)."""
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
    """The transform of training images, with the keys of `keys.TrainTransforms` (None: defaults).
    `exact_size` says that the data set's images have that size already. The normalization decides
    between color and gray. UserError for an unknown key or a wrong value."""
    from flow_train.config import keys, schema  # late: see keys.py

    options = schema.read(keys.TrainTransforms, config, "train_transforms")
    if options.no_aug:
        return build_eval_transform(
            image_size,
            normalization,
            {"crop_pct": 1.0, "interpolation": "bilinear"},
            exact_size=exact_size,
        )
    interpolation = _INTERPOLATIONS.get(options.interpolation)
    augment: AugmentImage | None = None
    if options.auto_augment:
        policy = parse_rand_augment(options.auto_augment)
        augment = replace(policy, fill=normalization.mean_color, interpolation=interpolation)
    elif options.color_jitter is not None:
        augment = ColorJitter(options.color_jitter)
    erase = None
    if options.re_prob > 0:
        erase = RandomErasing(options.re_prob, options.re_mode, options.re_count)
    if options.pad is not None:
        return PadCropTransform(
            image_size, options.pad, options.hflip, normalization, augment=augment, erase=erase
        )
    (least, most), (narrow, wide) = options.scale, options.ratio
    # The whole of a square image is the only crop that has all of its area.
    crops = (least, most) != (1, 1) or not narrow <= 1 <= wide
    if exact_size and not crops and options.hflip == 0 and augment is None and erase is None:
        return PlainTransform(normalization)
    return TrainTransform(
        image_size,
        (least, most),
        options.hflip,
        ratio=(narrow, wide),
        interpolation=interpolation,
        normalization=normalization,
        augment=augment,
        erase=erase,
    )


def build_eval_transform(
    image_size: int,
    normalization: Normalization,
    config: Mapping[str, Any] | None = None,
    *,
    exact_size: bool = False,
    name: str = "val_transforms",
) -> Transform:
    """The transform of validation and test images, with the keys of `keys.EvalTransforms`, which
    messages call `name`: the shorter side becomes `floor(image_size / crop_pct)`, then the center
    is cropped. Images that have the `exact_size` already are only normalized if there is no config.
    The normalization decides between color and gray. UserError for an unknown key or a wrong
    value."""
    from flow_train.config import keys, schema  # late: see keys.py

    options = schema.read(keys.EvalTransforms, config, name)
    resize_size = options.resize_size or math.floor(image_size / options.crop_pct)
    if resize_size < image_size:
        raise UserError(
            f"{name}: resize_size is {resize_size}, below the image size {image_size}; nothing "
            "could be cropped from that"
        )
    if exact_size and (config is None or resize_size == image_size):
        return PlainTransform(normalization)
    return EvalTransform(
        image_size,
        resize_size=resize_size,
        interpolation=_INTERPOLATIONS[options.interpolation],
        normalization=normalization,
    )
