"""Weights and images by formula (../shared/docs/vitae_spec.md, 2.4), which has figures for them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np


def entry(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """One entry of a state dict, by its published name: float64, counters int64."""
    if key.endswith("num_batches_tracked"):
        return np.zeros(shape, dtype=np.int64)
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    code = zlib.crc32(key.encode())
    u = np.modf(index * 0.6180339887498949 + (code % 10007) / 10007)[0]
    v = (2 * u - 1).reshape(shape)
    if key.endswith("running_var"):
        return 1 + 0.2 * v
    if key.endswith("running_mean"):
        return 0.1 * v
    if len(shape) == 1:
        return 1 + 0.1 * v if key.endswith(".weight") else 0.05 * v
    fan = shape[-1] if len(shape) == 3 else int(np.prod(shape[1:]))
    return v * np.sqrt(3 / fan)


def state(named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """A whole state dict, in float32."""
    arrays = {name: entry(name, shape) for name, shape in named_shapes}
    return {
        name: array if array.dtype == np.int64 else array.astype(np.float32)
        for name, array in arrays.items()
    }


def images(side: int = 224) -> np.ndarray:
    """(2, 3, side, side), float32. The fixture's figures are for 224."""
    index = np.arange(2 * 3 * side * side)
    return np.sin(0.01 * index + index // 50176).reshape(2, 3, side, side).astype(np.float32)
