"""Records of the operators that only move elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Layout, Record, case


def _permute(x: flow.Tensor, axes: tuple[int, ...]) -> flow.Tensor:
    return x.permute(*axes).contiguous()


def _permute_gradient(dy: np.ndarray, x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray]:
    return (dy.transpose(np.argsort(axes)),)


def _expand_gradient(dy: np.ndarray, x: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray]:
    added = len(shape) - x.ndim
    dy = dy.sum(axis=tuple(range(added)))
    repeated = tuple(k for k in range(x.ndim) if x.shape[k] != shape[added + k])
    return (dy.sum(axis=repeated, keepdims=True),)


def _placed(x: np.ndarray, dy: np.ndarray, where: Any) -> tuple[np.ndarray]:
    """dx of a selection: dy at the place `where`, 0 elsewhere."""
    dx = np.zeros_like(x)
    dx[where] = dy
    return (dx,)


def _narrow_range(axis: int, start: int, length: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(start, start + length),)


def _slices(ranges: tuple[tuple[int, int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in ranges)


def _split_sum(x: flow.Tensor, sizes: list[int], axis: int) -> flow.Tensor:
    """The parts weighted by 1, 2, ... and added up, so that each one matters."""
    parts = flow.split(x, sizes, dim=axis)
    total = parts[0] * 1.0
    for k, part in enumerate(parts[1:]):
        total = total + part * (k + 2.0)
    return total


def _split_sum_reference(x: np.ndarray, sizes: list[int], axis: int) -> np.ndarray:
    parts = np.split(x, np.cumsum(sizes)[:-1], axis)
    return sum((k + 1.0) * part for k, part in enumerate(parts))


def _split_sum_gradient(
    dy: np.ndarray, x: np.ndarray, sizes: list[int], axis: int
) -> tuple[np.ndarray]:
    return (np.concatenate([(k + 1.0) * dy for k in range(len(sizes))], axis),)


RECORDS = [
    Record(
        name="permute",
        operators=("transpose", "to_contiguous"),
        call=_permute,
        reference=lambda x, axes: x.transpose(axes),
        gradient=_permute_gradient,
        cases=[
            case("scalar", (), axes=()),
            case("empty", (3, 0, 2), axes=(2, 0, 1)),
            case("one element", (1, 1), axes=(1, 0)),
            case("identity", (3, 5), axes=(0, 1)),
            case("odd matrix", (17, 71), axes=(1, 0)),
            case("heads", (2, 19, 3, 16), axes=(0, 2, 1, 3)),
            case("keys", (2, 3, 33, 16), axes=(0, 1, 3, 2)),
            case("qkv", (2, 7, 3, 2, 5), axes=(2, 0, 3, 1, 4)),
            case("reversed", (3, 5, 7, 11), axes=(3, 2, 1, 0)),
            case("channels last", (2, 65, 30, 31), axes=(0, 2, 3, 1)),
            case("channels first", (2, 30, 31, 65), axes=(0, 3, 1, 2)),
            case("global", (4, 6, 8), axes=(2, 0, 1)),
        ],
        layouts=[
            Layout(("S(0)",), "S(1)"),
            Layout(("S(2)",), "S(0)"),
            Layout(("B",), "B"),
            Layout(("P",), "P"),
        ],
        dtypes=("float32", "float64", "bfloat16"),
    ),
    Record(
        name="expand",
        operators=("expand",),
        call=lambda x, shape: x.expand(*shape).contiguous(),
        reference=lambda x, shape: np.broadcast_to(x, shape),
        gradient=_expand_gradient,
        cases=[
            case("leading", (5,), shape=(3, 5), reduced=3),
            case("trailing", (7, 1), shape=(7, 13), reduced=13),
            case("middle", (3, 1, 5), shape=(3, 4, 5), reduced=4),
            case("both", (1, 3, 1), shape=(2, 6, 3, 9), reduced=108),
            case("large", (1, 1, 257), shape=(3, 301, 257), reduced=903),
        ],
    ),
    Record(
        name="narrow",
        operators=("narrow", "narrow_grad"),
        call=flow.narrow,
        reference=lambda x, dim, start, length: x[_narrow_range(dim, start, length)],
        gradient=lambda dy, x, dim, start, length: _placed(
            x, dy, _narrow_range(dim, start, length)
        ),
        cases=[
            case("vector", (9,), dim=0, start=2, length=3),
            case("first", (5, 7), dim=0, start=1, length=4),
            case("last", (5, 7), dim=1, start=6, length=1),
            case("middle", (3, 8, 5), dim=1, start=0, length=5),
            case("large", (301, 3, 257), dim=1, start=1, length=2),
        ],
        dtypes=("float32", "float64", "bfloat16"),
    ),
    Record(
        name="slice",
        operators=("slice", "slice_grad"),
        call=lambda x, ranges: x[_slices(ranges)].contiguous(),
        reference=lambda x, ranges: x[_slices(ranges)],
        gradient=lambda dy, x, ranges: _placed(x, dy, _slices(ranges)),
        cases=[
            case("vector", (9,), ranges=((1, 8, 3),)),
            case("rows", (6, 5), ranges=((2, 4, 1), (0, 5, 1))),
            case("steps", (7, 9, 5), ranges=((1, 7, 2), (0, 9, 4), (2, 4, 1))),
            case("from the end", (7, 9), ranges=((-3, 7, 1), (-9, -1, 2))),
            case("large", (400, 1001), ranges=((1, 399, 1), (3, 1001, 1))),
            case("global", (8, 6), ranges=((1, 6, 2), (0, 6, 1))),
        ],
        layouts=[
            Layout(("B",), "B"),
            Layout(("P",), "P"),
            Layout(("S(1)",), "S(1)"),
            Layout(("S(0)",), "P"),
        ],
        dtypes=("float32", "float64", "bfloat16"),
    ),
    Record(
        name="concat",
        operators=("concat", "split_like"),
        call=lambda *xs, axis: flow.cat(list(xs), dim=axis),
        reference=lambda *xs, axis: np.concatenate(xs, axis),
        gradient=lambda dy, *xs, axis: tuple(
            np.split(dy, np.cumsum([x.shape[axis] for x in xs])[:-1], axis)
        ),
        cases=[
            case("vectors", (3,), (1,), (17,), axis=0),
            case("rows", (3, 5), (4, 5), axis=0),
            case("columns", (3, 5), (3, 1), (3, 9), axis=1),
            case("middle", (3, 2, 5), (3, 7, 5), axis=1),
            case("large", (301, 200), (301, 501), axis=1),
            case("global", (4, 6), (4, 2), axis=1),
        ],
        layouts=[Layout(("S(0)", "S(0)"), "S(0)"), Layout(("B", "B"), "B")],
        dtypes=("float32", "float64", "bfloat16"),
    ),
    Record(
        name="split",
        operators=("split_like", "narrow"),
        call=_split_sum,
        reference=_split_sum_reference,
        gradient=_split_sum_gradient,
        cases=[
            case("last", (4, 6), sizes=[2, 2, 2], axis=1, reduced=3),
            case("first", (9, 5), sizes=[3, 3, 3], axis=0, reduced=3),
            case("large", (301, 3, 128), sizes=[1, 1, 1], axis=1, reduced=3),
        ],
    ),
]
