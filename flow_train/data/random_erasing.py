"""Random erasing of rectangles in a normalized image."""

from __future__ import annotations

import math

import numpy as np

MODES = ("const", "rand", "pixel")
_ATTEMPTS = 10


class RandomErasing:
    """Erases rectangles (Zhong et al. 2020, arXiv 1708.04896, algorithm 1).

    The area of a rectangle is uniform in its range, the logarithm of its aspect as well; one that
    does not lie inside the image with room to spare is drawn again, ten times in all.

    Args:
        prob: how likely an image has anything erased.
        mode: what is put there: "const" zeros, which is the mean color of a normalized image;
            "rand" one normally distributed color; "pixel" normally distributed noise.
        count: largest number of rectangles; the number is uniform from 1 to it, and each gets that
            part of the area.
        area: least and largest share of the image.
        aspect: least and largest height / width.
    """

    def __init__(
        self,
        prob: float,
        mode: str = "const",
        count: int = 1,
        area: tuple[float, float] = (0.02, 1 / 3),
        aspect: tuple[float, float] = (0.3, 1 / 0.3),
    ) -> None:
        if not 0 <= prob <= 1 or mode not in MODES or count < 1:
            raise ValueError(f"probability {prob}, mode '{mode}', count {count}")
        if not 0 < area[0] <= area[1] <= 1 or not 0 < aspect[0] <= aspect[1]:
            raise ValueError(f"area {tuple(area)}, aspect {tuple(aspect)}")
        self.prob = prob
        self.mode = mode
        self.count = count
        self.area = area
        self._log_aspect = (math.log(aspect[0]), math.log(aspect[1]))

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
            aspect = math.exp(rng.uniform(*self._log_aspect))
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
