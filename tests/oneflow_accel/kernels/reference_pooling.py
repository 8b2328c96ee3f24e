"""Two-dimensional pooling in float64 numpy, written out window by window."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Pair = tuple[int, int]
# One output element of one axis: the input positions it covers, and its length with padding.
Window = tuple[list[int], int]


def sliding(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> list[Window]:
    """The windows of one axis, by PyTorch's rule for their number."""
    span = dilation * (kernel - 1) + 1
    count = (size + 2 * padding - span + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    windows = []
    for i in range(count):
        start = i * stride - padding
        taps = [start + k * dilation for k in range(kernel)]
        windows.append(
            ([t for t in taps if 0 <= t < size], min(start + span, size + padding) - start)
        )
    return windows


def adaptive(size: int, outputs: int) -> list[Window]:
    windows = []
    for i in range(outputs):
        taps = list(range(i * size // outputs, -(-(i + 1) * size // outputs)))
        windows.append((taps, len(taps)))
    return windows


def max_reference(
    x: np.ndarray, rows: list[Window], columns: list[Window], dy_of: Callable
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, index (row * W + column) and input gradient for (N, C, H, W); the first maximum."""
    n, c, _, width = x.shape
    y = np.full((n, c, len(rows), len(columns)), -np.inf)
    index = np.full(y.shape, -1)
    dy, dx = dy_of(y.shape), np.zeros(x.shape)
    for i, (row, _) in enumerate(rows):
        for j, (column, _) in enumerate(columns):
            if not row or not column:
                continue
            flat = x[:, :, np.array(row)[:, None], column].reshape(n, c, len(row) * len(column))
            best = flat.argmax(-1)
            y[:, :, i, j] = np.take_along_axis(flat, best[..., None], -1)[..., 0]
            h, w = np.array(row)[best // len(column)], np.array(column)[best % len(column)]
            index[:, :, i, j] = h * width + w
            np.add.at(
                dx, (np.arange(n)[:, None], np.arange(c)[None], h, w), dy[:, :, i, j].astype(float)
            )
    return y, index, dx


def average_reference(
    x: np.ndarray,
    rows: list[Window],
    columns: list[Window],
    dy_of: Callable,
    count_padding: bool = False,
    divisor: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and input gradient for (N, C, H, W)."""
    y = np.zeros((*x.shape[:2], len(rows), len(columns)))
    dy, dx = dy_of(y.shape), np.zeros(x.shape)
    for i, (row, height) in enumerate(rows):
        for j, (column, width) in enumerate(columns):
            where = (slice(None), slice(None), np.array(row)[:, None], column)
            size = height * width if count_padding else len(row) * len(column)
            size = divisor or size
            y[:, :, i, j] = x[where].astype(np.float64).sum((-1, -2)) / size
            dx[where] += dy[:, :, i, j, None, None].astype(np.float64) / size
    return y, dx


def windows_of(
    shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil: bool
) -> tuple[list[Window], list[Window]]:
    rows, columns = (
        sliding(shape[2 + i], kernel[i], stride[i], padding[i], dilation[i], ceil) for i in (0, 1)
    )
    return rows, columns
