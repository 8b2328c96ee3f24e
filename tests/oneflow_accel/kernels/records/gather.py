"""Records of the operators that look rows up and add rows up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from tests.oneflow_accel.kernels.record import Layout, Record, Shape, case

IndexArray = Callable[[np.random.Generator], np.ndarray]


def _indices(size: int, shape: Shape, dtype: Any = np.int64) -> IndexArray:
    """Indices below `size`, some of them more than once."""
    return lambda generator: generator.integers(0, size, shape).astype(dtype)


def _gather_gradient(
    dy: np.ndarray, table: np.ndarray, indices: np.ndarray, axis: int
) -> tuple[np.ndarray, None]:
    dx = np.zeros_like(table)
    rows = dy.reshape(*table.shape[:axis], indices.size, *table.shape[axis + 1 :])
    where = (slice(None),) * axis + (indices.reshape(-1),)
    np.add.at(dx, where, rows)
    return dx, None


def _embedding_gradient(
    dy: np.ndarray, table: np.ndarray, indices: np.ndarray, padding_idx: int, by_frequency: bool
) -> tuple[np.ndarray, None]:
    dx, _ = _gather_gradient(dy, table, indices, axis=0)
    if by_frequency:
        dx /= np.maximum(np.bincount(indices.reshape(-1), minlength=len(table)), 1)[:, None]
    dx[padding_idx] = 0
    return dx, None


ALL = ("float32", "float64", "bfloat16")

RECORDS = [
    Record(
        name="gather",
        operators=("gather", "unsorted_segment_sum_like"),
        call=flow._C.gather,
        reference=lambda table, indices, axis: np.take(table, indices, axis),
        gradient=_gather_gradient,
        cases=[
            case("rows", (7, 5), _indices(7, (4, 3)), axis=0, reduced=12),
            case("int32", (7, 5), _indices(7, (11,), np.int32), axis=0, reduced=11),
            case("vector", (9,), _indices(9, (2, 3)), axis=0, reduced=6),
            case("last axis", (3, 5), _indices(5, (8,)), axis=1, reduced=8),
            case("middle axis", (3, 5, 7), _indices(5, (2, 3)), axis=1, reduced=6),
            case("no index", (7, 5), _indices(7, (0,)), axis=0),
            case("one row", (1, 17), _indices(1, (19,)), axis=0, reduced=19),
            case("large", (5003, 96), _indices(5003, (2, 301)), axis=0, reduced=602),
            case("global", (7, 6), _indices(7, (4, 2)), axis=0, reduced=8),
        ],
        # The third one is an embedding whose rows are split: each process gives 0 for the others'.
        layouts=[
            Layout(("B", "B"), "B"),
            Layout(("B", "S(0)"), "S(0)"),
            Layout(("S(0)", "B"), "P"),
            Layout(("S(1)", "B"), "S(2)"),
        ],
        dtypes=ALL,
        gradient_dtypes=ALL,
    ),
    Record(
        name="embedding",
        operators=("embedding", "embedding_grad"),
        call=lambda table, indices, padding_idx, by_frequency: nn.functional.embedding(
            indices, table, padding_idx=padding_idx, scale_grad_by_freq=by_frequency
        ),
        reference=lambda table, indices, padding_idx, by_frequency: table[indices],
        gradient=_embedding_gradient,
        cases=[
            case("padding", (7, 5), _indices(6, (4, 3)), padding_idx=6, by_frequency=False),
            # The gradient is deliberately not the derivative where these two options count, which
            # only a case too large for central differences may show.
            case("padding row", (99, 9), _indices(99, (4, 99)), padding_idx=2, by_frequency=False),
            case("frequency", (99, 96), _indices(99, (600,)), padding_idx=5, by_frequency=True),
        ],
        dtypes=("float32", "bfloat16"),
        gradient_dtypes=("float32", "bfloat16"),
    ),
]
