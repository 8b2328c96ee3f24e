"""Dropout masks as OneFlow's generator for CPUs draws them, from NumPy's MT19937."""

from __future__ import annotations

import numpy as np


class Masks:
    """Draws the masks that oneflow draws after `manual_seed(seed)`.

    `numpy.random.RandomState(seed)` and `std::mt19937(seed)` give the same words; a word times
    2**-32, rounded to float32, is the uniform number that is compared with the rate.
    """

    def __init__(self, seed: int) -> None:
        self.engine = np.random.RandomState(seed & 0xFFFFFFFF)

    def _uniform(self, shape: tuple[int, ...]) -> np.ndarray:
        n = int(np.prod(shape))
        # bytes(0) would draw a word.
        words = np.frombuffer(self.engine.bytes(4 * n) if n else b"", "<u4").reshape(shape)
        largest = np.nextafter(np.float32(1), np.float32(0))
        return np.minimum(words.astype(np.float32) * np.float32(2**-32), largest)

    def dropout(self, shape: tuple[int, ...], rate: float) -> np.ndarray:
        return self._uniform(shape) >= np.float32(rate)

    def mask_like(self, shape: tuple[int, ...], rate: float) -> np.ndarray:
        """The mask of random_mask_like, which the fused operators use."""
        return self._uniform(shape) > np.float32(rate)
