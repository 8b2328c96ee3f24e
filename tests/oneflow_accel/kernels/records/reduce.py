"""Records of the operators that sum over axes."""

from __future__ import annotations

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Layout, Record, case

_LAYOUTS = [
    Layout(("S(0)",), "P"),
    Layout(("S(1)",), "S(0)"),
    Layout(("B",), "B"),
    Layout(("P",), "P"),
]
Axes = tuple[int, ...]


def _spread(dy: np.ndarray, x: np.ndarray, dim: Axes, keepdim: bool) -> np.ndarray:
    """dy repeated over the axes that were summed over."""
    return np.broadcast_to(dy if keepdim else np.expand_dims(dy, dim), x.shape)


def _sum_to_gradient(dy: np.ndarray, x: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, ...]:
    added = dy.ndim - bias.ndim
    summed = dy.sum(axis=tuple(range(added)))
    repeated = tuple(k for k in range(bias.ndim) if bias.shape[k] == 1)
    return dy, summed.sum(axis=repeated, keepdims=True)


RECORDS = [
    Record(
        name="sum",
        operators=("reduce_sum", "broadcast_like"),
        call=flow.sum,
        reference=lambda x, dim, keepdim: x.sum(axis=dim, keepdims=keepdim),
        gradient=lambda dy, x, dim, keepdim: (_spread(dy, x, dim, keepdim),),
        cases=[
            case("one element", (1,), dim=(0,), keepdim=True),
            case("nothing", (0,), dim=(0,), keepdim=True),
            case("nothing in columns", (0, 3), dim=(0,), keepdim=False),
            case("rows", (17, 3), dim=(1,), keepdim=False, reduced=3),
            case("columns", (17, 3), dim=(0,), keepdim=True, reduced=17),
            case("middle", (3, 17, 5), dim=(1,), keepdim=False, reduced=17),
            case("outer and inner", (3, 7, 5), dim=(0, 2), keepdim=False, reduced=15),
            case("channels", (2, 3, 9, 11), dim=(0, 2, 3), keepdim=True, reduced=198),
            case("alternating", (2, 3, 4, 5, 6), dim=(1, 3), keepdim=False, reduced=15),
            case("prime", (1, 1000003), dim=(1,), keepdim=False, reduced=1000003),
            case("bias gradient", (1576, 193), dim=(0,), keepdim=False, reduced=1576),
            case("long rows", (3, 70001), dim=(1,), keepdim=False, reduced=70001),
            case("all", (30, 40, 50), dim=(0, 1, 2), keepdim=True, reduced=60000),
            case("global", (6, 8), dim=(0,), keepdim=False, reduced=6),
        ],
        layouts=_LAYOUTS,
        dtypes=("float32", "float64"),
    ),
    Record(
        name="mean",
        operators=("reduce_sum", "broadcast_like"),
        call=flow.mean,
        reference=lambda x, dim, keepdim: x.mean(axis=dim, keepdims=keepdim),
        gradient=lambda dy, x, dim, keepdim: (
            _spread(dy, x, dim, keepdim) * np.size(dy) / np.size(x),
        ),
        cases=[
            case("rows", (17, 3), dim=(1,), keepdim=False),
            case("pooling", (2, 5, 7, 7), dim=(2, 3), keepdim=True),
            case("large", (64, 9001), dim=(1,), keepdim=False),
        ],
    ),
    Record(
        name="gradient of a broadcast operand",
        operators=("reduce_sum_like",),
        call=lambda x, bias: x + bias,
        reference=lambda x, bias: x + bias,
        gradient=_sum_to_gradient,
        cases=[
            case("bias", (5, 7, 3), (3,), reduced=35),
            case("both ends", (4, 5, 6), (1, 5, 1), reduced=24),
            case("large", (301, 257), (257,), reduced=301),
        ],
    ),
]
