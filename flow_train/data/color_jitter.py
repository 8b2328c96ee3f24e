"""Random changes of brightness, contrast, saturation and hue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageEnhance

# The strengths are given in this order; the order of the changes is random.
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
