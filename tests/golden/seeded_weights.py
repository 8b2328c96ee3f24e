"""Weights and images that any Python with numpy makes alike, bit for bit, from a seed.

Golden values made by another framework's process then need no file of weights. Only the raw
output of PCG64 is used: numpy keeps that the same between releases, which it does not promise for
its distributions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np


def uniform(
    name: str, shape: tuple[int, ...], low: float, high: float, seed: int = 0
) -> np.ndarray:
    """Uniform float32 numbers in [low, high), of 24 random bits each, from (name, seed)."""
    generator = np.random.PCG64([seed, zlib.crc32(name.encode())])
    count = int(np.prod(shape, dtype=np.int64))
    unit = (generator.random_raw(count) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return (low + (high - low) * unit).astype(np.float32).reshape(shape)


def resnet_state(named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """A state dict for a torchvision ResNet whose logits are of order 1.

    Args:
        named_shapes: name and shape of each entry of the model's state dict, OIHW for weights.

    Returns:
        Convolutions and the classifier: uniform with variance 2 / fan-in and 1 / fan-in. BatchNorm:
        every parameter and statistic differs from its initial value; the scale of the last one of
        a residual block is small, so that activations do not grow from block to block.
    """
    state = {}
    for name, shape in named_shapes:
        if name.endswith("num_batches_tracked"):
            state[name] = np.array(100, dtype=np.int64)
        elif name.endswith("running_mean"):
            state[name] = uniform(name, shape, -0.2, 0.2)
        elif name.endswith("running_var"):
            state[name] = uniform(name, shape, 0.5, 1.5)
        elif len(shape) > 1:
            variance = (2.0 if len(shape) == 4 else 1.0) / float(np.prod(shape[1:]))
            bound = (3.0 * variance) ** 0.5
            state[name] = uniform(name, shape, -bound, bound)
        elif name.endswith(".bias"):
            state[name] = uniform(name, shape, -0.2, 0.2)
        else:
            scale = 0.3 if ".bn3." in name else 0.7
            state[name] = uniform(name, shape, 0.5 * scale, 1.5 * scale)
    return state


def images(count: int, size: int) -> np.ndarray:
    """Images (count, 3, size, size), float32: in turn noise and a chessboard of 8 x 8 colors."""
    pictures = []
    for index in range(count):
        side = size if index % 2 == 0 else 8
        picture = uniform(f"image {index}", (3, side, side), -2.0, 2.0)
        pictures.append(picture.repeat(size // side, axis=1).repeat(size // side, axis=2))
    return np.stack(pictures)
