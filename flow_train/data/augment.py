"""Transforms from their configuration, with the keys of timm's create_transform; random changes of
color, random erasing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from PIL import Image, ImageEnhance

from flow_train.data.rand_augment import parse_rand_augment
from flow_train.data.transforms import (
    AugmentImage,
    EvalTransform,
    Normalization,
    PadCropTransform,
    PlainTransform,
    TrainTransform,
    Transform,
)

_INTERPOLATIONS = {resampling.name.lower(): resampling for resampling in Image.Resampling}


_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class ColorJitter:
    """Changes an image's colors as torchvision's transform of this name, in random order.

    Brightness, contrast and saturation are each multiplied by a factor that is uniform from max(0,
    1 - strength) to 1 + strength; hue is turned by a part of the circle that is uniform from
    -strength to strength. `strength` is one number for the first three, or three numbers, or four
    with that of hue, which is at most 0.5.
    """

    def __init__(self, strength: float | Sequence[float]) -> None:
        given = [float(s) for s in strength] if isinstance(strength, Sequence) else None
        strengths = given if given is not None else [float(strength)] * 3  # type: ignore[arg-type]
        if len(strengths) == 3:
            strengths = [*strengths, 0.0]
        if len(strengths) != 4 or min(strengths) < 0 or strengths[3] > 0.5:
            raise ValueError(f"color jitter {strength}: expected 1, 3 or 4 values, hue up to 0.5")
        self.strengths = tuple(strengths)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        """The changed image, of the same mode (RGB or L)."""
        for which in rng.permutation(4):
            strength = self.strengths[which]
            if strength == 0:
                continue
            if which == 3:
                image = turn_hue(image, rng.uniform(-strength, strength))
            else:
                factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
                image = _ENHANCERS[which](image).enhance(factor)
        return image


def turn_hue(image: Image.Image, part: float) -> Image.Image:
    """Turn the hue by a part of the circle, from -0.5 to 0.5; a gray image has none."""
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    # The circle of hues has 256 steps.
    turned = np.asarray(hue).astype(np.int32) + int(part * 255)
    hue = Image.fromarray((turned % 256).astype(np.uint8))
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


ERASING_MODES = ("const", "rand", "pixel")
_ATTEMPTS = 10


@dataclass(frozen=True)
class RandomErasing:
    """Erases rectangles (Zhong et al. 2020, arXiv 1708.04896, algorithm 1).

    The area of a rectangle is uniform in its range, the logarithm of its aspect as well; one that
    does not lie inside the image with room to spare is drawn again, ten times in all.

    Attributes:
        prob: how likely an image has anything erased.
        mode: what is put there: "const" zeros, which is the mean color of a normalized image;
            "rand" one normally distributed color; "pixel" normally distributed noise.
        count: largest number of rectangles; the number is uniform from 1 to it, and each gets that
            part of the area.
        area: least and largest share of the image.
        aspect: least and largest height / width.
    """

    prob: float
    mode: str = "const"
    count: int = 1
    area: tuple[float, float] = (0.02, 1 / 3)
    aspect: tuple[float, float] = (0.3, 1 / 0.3)

    def __post_init__(self) -> None:
        if not 0 <= self.prob <= 1 or self.mode not in ERASING_MODES or self.count < 1:
            raise ValueError(f"probability {self.prob}, mode '{self.mode}', count {self.count}")
        (small, large), (wide, high) = self.area, self.aspect
        if not 0 < small <= large <= 1 or not 0 < wide <= high:
            raise ValueError(f"area {tuple(self.area)}, aspect {tuple(self.aspect)}")

    def __call__(self, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Erase in place in a normalized image: float32, (height, width, channels)."""
        if rng.random() >= self.prob:
            return array
        count = int(rng.integers(1, self.count + 1))
        for _ in range(count):
            box = self._draw_box(array.shape[0], array.shape[1], count, rng)
            if box is not None:
                top, left, height, width = box
                patch = array[top : top + height, left : left + width]
                patch[...] = self._content(patch.shape, rng)
        return array

    def _draw_box(
        self, height: int, width: int, count: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int] | None:
        """top, left, height, width; None where no draw fits."""
        for _ in range(_ATTEMPTS):
            area = rng.uniform(*self.area) * height * width / count
            aspect = math.exp(rng.uniform(math.log(self.aspect[0]), math.log(self.aspect[1])))
            box_height = round(math.sqrt(area * aspect))
            box_width = round(math.sqrt(area / aspect))
            if box_height < height and box_width < width:
                top = int(rng.integers(height - box_height + 1))
                left = int(rng.integers(width - box_width + 1))
                return top, left, box_height, box_width
        return None

    def _content(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray | float:
        if self.mode == "const":
            return 0.0
        size = shape if self.mode == "pixel" else shape[-1:]
        return rng.standard_normal(size, dtype=np.float32)


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
    last: dict[str, Any] = {"normalization": normalization, "augment": augment, "erase": erase}
    if options.pad is not None:
        return PadCropTransform(image_size, options.pad, options.hflip, **last)
    (least, most), (narrow, wide) = options.scale, options.ratio
    # The whole of a square image is the only crop that has all of its area.
    crops = (least, most) != (1, 1) or not narrow <= 1 <= wide
    if exact_size and not crops and options.hflip == 0 and augment is None and erase is None:
        return PlainTransform(normalization)
    shape = (least, most), options.hflip, (narrow, wide)
    return TrainTransform(image_size, *shape, interpolation, **last)


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
