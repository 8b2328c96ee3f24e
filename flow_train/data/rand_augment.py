"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719), described by strings as timm's.

`rand-m9-mstd0.5-inc1` is: two operations per image (n), each with probability 0.5 (p) and a
magnitude of 9 out of 10 (m) with normally distributed noise of standard deviation 0.5 (mstd), from
the set whose effect grows with the magnitude (inc).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from oneflow_accel.errors import UserError

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

# Magnitudes are given in tenths.
_FULL = 10.0
# From here on `mstd` means a magnitude that is uniform from 0 to m.
_UNIFORM_FROM = 100.0
# The paper's scale; what is above `mmax`, 10 of these unless it is given, is cut to that.
_LARGEST = 30.0
_MAX_ROTATION, _MAX_SHEAR, _MAX_SHIFT = 30.0, 0.3, 0.45


@dataclass(frozen=True)
class Canvas:
    """What operations that move pixels need: the color of what comes in from outside (a value per
    channel, an integer for gray), and the interpolation of the moved pixels."""

    fill: tuple[int, ...] | int
    interpolation: Image.Resampling


# From the magnitude as a part of the full one, and a random generator, to the strength: degrees,
# bits, a factor, ...
Strength = Callable[[float, np.random.Generator], float]
Apply = Callable[[Image.Image, float, Canvas], Image.Image]


def _either_sign(value: float, rng: np.random.Generator) -> float:
    return -value if rng.random() < 0.5 else value


def _affine(image: Image.Image, canvas: Canvas, *matrix: float) -> Image.Image:
    kind, moved = Image.Transform.AFFINE, canvas.interpolation
    return image.transform(image.size, kind, matrix, resample=moved, fillcolor=canvas.fill)


def _solarize_add(image: Image.Image, add: float, canvas: Canvas) -> Image.Image:
    table = [min(255, value + int(add)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance], weight: float) -> Operation:
    """Color, contrast, ...: the image itself at the factor 1."""
    return Operation(
        lambda image, factor, _: enhancer(image).enhance(factor),
        lambda part, _: 0.1 + 1.8 * part,
        lambda part, rng: max(0.1, 1 + _either_sign(0.9 * part, rng)),
        weight,
    )


def _up_to(most: float) -> Strength:
    return lambda part, rng: _either_sign(most * part, rng)


@dataclass(frozen=True)
class Operation:
    """One kind of change to an image. `strength` comes from the magnitude; `growing` is the same
    for the set `inc1`, where the strength decreases with the magnitude or has its neutral point in
    the middle. `weight` is how likely it is drawn with `w0`, relative to the others."""

    apply: Apply
    strength: Strength | None = None
    growing: Strength | None = None
    weight: float = 0.0


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": Operation(lambda image, _, __: ImageOps.autocontrast(image), weight=0.025),
    "Equalize": Operation(lambda image, _, __: ImageOps.equalize(image), weight=0.005),
    "Invert": Operation(lambda image, _, __: ImageOps.invert(image)),
    "Rotate": Operation(
        lambda image, by, to: image.rotate(by, resample=to.interpolation, fillcolor=to.fill),
        _up_to(_MAX_ROTATION),
        weight=0.3,
    ),
    "Posterize": Operation(
        lambda image, bits, _: ImageOps.posterize(image, int(bits)),
        lambda part, _: int(4 * part),
        lambda part, _: 4 - int(4 * part),
    ),
    "Solarize": Operation(
        lambda image, threshold, _: ImageOps.solarize(image, int(threshold)),
        lambda part, _: min(256, int(256 * part)),
        lambda part, _: 256 - min(256, int(256 * part)),
        weight=0.005,
    ),
    "SolarizeAdd": Operation(
        _solarize_add, lambda part, _: min(128, int(110 * part)), weight=0.005
    ),
    "Color": _enhance(ImageEnhance.Color, 0.025),
    "Contrast": _enhance(ImageEnhance.Contrast, 0.005),
    "Brightness": _enhance(ImageEnhance.Brightness, 0.005),
    "Sharpness": _enhance(ImageEnhance.Sharpness, 0.025),
    "ShearX": Operation(
        lambda image, shear, to: _affine(image, to, 1, shear, 0, 0, 1, 0),
        _up_to(_MAX_SHEAR),
        weight=0.2,
    ),
    "ShearY": Operation(
        lambda image, shear, to: _affine(image, to, 1, 0, 0, shear, 1, 0),
        _up_to(_MAX_SHEAR),
        weight=0.2,
    ),
    "TranslateXRel": Operation(
        lambda image, part, to: _affine(image, to, 1, 0, part * image.width, 0, 1, 0),
        _up_to(_MAX_SHIFT),
        weight=0.1,
    ),
    "TranslateYRel": Operation(
        lambda image, part, to: _affine(image, to, 1, 0, 0, 0, 1, part * image.height),
        _up_to(_MAX_SHIFT),
        weight=0.1,
    ),
}


@dataclass(frozen=True)
class RandAugment:
    """Some random operations on an image.

    Attributes:
        n: number of operations per image.
        m: magnitude, 0 to 10.
        p: how likely each of them is carried out.
        mstd: standard deviation of the magnitude; infinite for one that is uniform from 0 to m.
        mmax: largest magnitude after the noise. With the default of 10, an m of 15 is 10.
        inc: operations whose effect grows with the magnitude, see `Operation.growing`.
        weighted: draw the operations by their weights, and none twice (w0).
        fill: color of what comes in from outside, per channel.
        interpolation: of moved pixels; None for bilinear or bicubic, drawn for each operation.
    """

    n: int = 2
    m: float = _FULL
    p: float = 0.5
    mstd: float = 0.0
    mmax: float = _FULL
    inc: bool = False
    weighted: bool = False
    fill: tuple[int, ...] = (128, 128, 128)
    interpolation: Image.Resampling | None = None

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        """The changed image, of the same size and mode (RGB or L)."""
        for name in self.draw_names(rng):
            if rng.random() < self.p:
                image = self.apply(name, image, self.draw_magnitude(rng), rng)
        return image

    def draw_names(self, rng: np.random.Generator) -> list[str]:
        names = list(OPERATIONS)
        if not self.weighted:
            return [names[which] for which in rng.integers(len(names), size=self.n)]
        weights = np.array([operation.weight for operation in OPERATIONS.values()])
        chosen = rng.choice(len(names), self.n, replace=False, p=weights / weights.sum())
        return [names[which] for which in chosen]

    def draw_magnitude(self, rng: np.random.Generator) -> float:
        magnitude = self.m
        if math.isinf(self.mstd):
            magnitude = rng.uniform(0, self.m)
        elif self.mstd > 0:
            magnitude = rng.normal(self.m, self.mstd)
        return min(max(magnitude, 0.0), self.mmax)

    def apply(
        self, name: str, image: Image.Image, magnitude: float, rng: np.random.Generator
    ) -> Image.Image:
        operation = OPERATIONS[name]
        strength = (operation.growing if self.inc else None) or operation.strength
        value = 0.0 if strength is None else strength(magnitude / _FULL, rng)
        interpolation = self.interpolation
        if interpolation is None:
            bicubic = rng.random() < 0.5
            interpolation = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        fill = self.fill if image.mode == "RGB" else round(sum(self.fill) / len(self.fill))
        return operation.apply(image, value, Canvas(fill, interpolation))


def parse_rand_augment(text: str) -> RandAugment:
    """Read a description such as `rand-m9-mstd0.5-inc1`.

    The parts after `rand`, in any order: m (magnitude), n (operations per image), p (probability of
    each), mstd (noise of the magnitude; above 100: uniform), mmax (largest magnitude), inc (0 or
    1), w (0: by weights). UserError if it begins with something else, or a part is unknown, has no
    number, comes twice or is out of range.
    """
    head, *parts = text.split("-")
    if head != "rand":
        raise UserError(f"auto_augment '{text}' is not known; use one such as rand-m9-mstd0.5-inc1")
    values: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"(mstd|mmax|inc|m|n|p|w)(\d+(?:\.\d+)?)", part)
        if match is None or match[1] in values:
            raise UserError(
                f"auto_augment '{text}': cannot read the part '{part}'; there are m, n, p, mstd, "
                "mmax, inc and w, each once and with a number, as in rand-m9-mstd0.5-inc1"
            )
        values[match[1]] = float(match[2])
    allowed = {"inc": values.get("inc", 0) in (0, 1), "w": values.get("w", 0) == 0}
    most = sum(operation.weight > 0 for operation in OPERATIONS.values())
    n = values.get("n", 2)
    allowed["n"] = n == int(n) and 1 <= n <= (most if "w" in values else math.inf)
    allowed["m"] = values.get("m", _FULL) <= _LARGEST
    allowed["p"] = 0 <= values.get("p", 0.5) <= 1
    for key, fits in allowed.items():
        if not fits:
            raise UserError(f"auto_augment '{text}': {key}{values[key]:g} is out of range")
    mstd = values.get("mstd", 0.0)
    return RandAugment(
        n=int(n),
        m=values.get("m", _FULL),
        p=values.get("p", 0.5),
        mmax=values.get("mmax", _FULL),
        inc=bool(values.get("inc", 0)),
        weighted="w" in values,
        mstd=math.inf if mstd > _UNIFORM_FROM else mstd,
    )
