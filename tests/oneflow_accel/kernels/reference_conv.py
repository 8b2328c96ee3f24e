"""Convolution of any number of spatial dimensions, and its gradients, in float64 numpy.

One term per kernel offset: the output is a sum, over the offsets, of a shifted and strided view of
the padded input times one matrix of weights. The gradients are the transposes of that sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

Ints = tuple[int, ...]
FORMATS = ("channels_first", "channels_last")
FIRST, LAST = FORMATS


def to_format(array: np.ndarray, data_format: str) -> np.ndarray:
    """(N, C, spatial...) or (O, I, kernel...) in the order of `data_format`."""
    return array if data_format == FIRST else np.ascontiguousarray(np.moveaxis(array, 1, -1))


def from_format(array: np.ndarray, data_format: str) -> np.ndarray:
    return array if data_format == FIRST else np.moveaxis(array, -1, 1)


def shape_in(shape: Ints, data_format: str) -> Ints:
    return shape if data_format == FIRST else (shape[0], *shape[2:], shape[1])


@dataclass(frozen=True)
class ConvCase:
    """x (N, C, spatial...), weights (O, C / groups, kernel...); channels are (C, O).

    Sizes, stride, padding (on both sides) and dilation are by spatial dimension.
    """

    batch: int
    channels: tuple[int, int]
    spatial: Ints
    kernel: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int = 1

    @property
    def x_shape(self) -> Ints:
        return (self.batch, self.channels[0], *self.spatial)

    @property
    def weight_shape(self) -> Ints:
        return (self.channels[1], self.channels[0] // self.groups, *self.kernel)

    @property
    def out_spatial(self) -> Ints:
        sizes = zip(
            self.spatial, self.kernel, self.stride, self.padding, self.dilation, strict=True
        )
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    @property
    def y_shape(self) -> Ints:
        return (self.batch, self.channels[1], *self.out_spatial)

    @property
    def geometry(self) -> dict[str, Any]:
        """As operators take it."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    @property
    def terms(self) -> dict[str, int]:
        """How many products the largest element of each result sums up."""
        channels_in, channels_out = self.channels
        window = int(np.prod(self.kernel))
        pixels = self.batch * int(np.prod(self.out_spatial))
        return {
            "y": window * channels_in // self.groups + 1,
            "dx": window * channels_out // self.groups,
            "dw": pixels,
            "db": pixels,
        }


def _offsets(case: ConvCase) -> Iterator[tuple[Ints, tuple[slice, ...]]]:
    """Every kernel offset, with the input positions (padded) that it meets."""
    for offset in product(*(range(k) for k in case.kernel)):
        axes = zip(offset, case.dilation, case.stride, case.out_spatial, strict=True)
        yield (offset, tuple(slice(o * d, o * d + s * (n - 1) + 1, s) for o, d, s, n in axes))


def _padded(case: ConvCase, x: np.ndarray) -> np.ndarray:
    return np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((p, p) for p in case.padding)])


def _split(case: ConvCase, tensor: np.ndarray) -> np.ndarray:
    """(N, C, spatial...) as (N, groups, C / groups, pixels)."""
    batch, channels = tensor.shape[:2]
    pixels = int(np.prod(tensor.shape[2:]))
    return tensor.reshape(batch, case.groups, channels // case.groups, pixels)


def _matrices(case: ConvCase, weight: np.ndarray) -> np.ndarray:
    """(O, C / groups, kernel...) as (groups, O / groups, C / groups, kernel...)."""
    return weight.astype(np.float64).reshape(
        case.groups, case.channels[1] // case.groups, *weight.shape[1:]
    )


def conv_forward(case: ConvCase, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """y (N, O, spatial...) in float64."""
    padded, matrices = _padded(case, x), _matrices(case, weight)
    y = np.zeros((case.batch, case.groups, matrices.shape[1], int(np.prod(case.out_spatial))))
    for offset, window in _offsets(case):
        matrix = matrices[(..., *offset)]
        y += np.einsum("goc,ngcp->ngop", matrix, _split(case, padded[(..., *window)]))
    channels = (1, -1, *(1 for _ in case.spatial))
    return y.reshape(case.y_shape) + bias.astype(np.float64).reshape(channels)


def conv_gradients(
    case: ConvCase, x: np.ndarray, weight: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dw, db) of sum(y * dy), in float64."""
    padded, matrices = _padded(case, x), _matrices(case, weight)
    dy = dy.astype(np.float64)
    out_grads = _split(case, dy)
    dx = np.zeros_like(padded)
    dw = np.zeros_like(matrices)
    for offset, window in _offsets(case):
        view = padded[(..., *window)]
        matrix = matrices[(..., *offset)]
        dx[(..., *window)] += np.einsum("goc,ngop->ngcp", matrix, out_grads).reshape(view.shape)
        dw[(..., *offset)] = np.einsum("ngop,ngcp->goc", out_grads, _split(case, view))
    inside = tuple(slice(p, p + n) for p, n in zip(case.padding, case.spatial, strict=True))
    db = dy.sum(axis=(0, *range(2, dy.ndim)))
    return dx[(..., *inside)], dw.reshape(weight.shape), db
