"""Products with Monarch matrices, with and without a bias, short rows and a cut."""

from __future__ import annotations

from oneflow_accel.kernels.monarch import monarch_multiply

import numpy as np

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Case, Layout, Record, case

Gradients = tuple[np.ndarray, np.ndarray, np.ndarray]


def dense(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Slot t is a row of the first's block t div q, and a column of the second's block t mod l."""
    (k, q, p), (blocks, s, _) = a.shape, b.shape
    matrix = np.zeros((blocks * s, k * p))
    for t in range(k * q):
        first, second = divmod(t, q), divmod(t, blocks)
        columns = slice(first[0] * p, (first[0] + 1) * p)
        matrix[second[1] :: blocks, columns] += np.outer(b[second[1], :, second[0]], a[first])
    return matrix


def _reference(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, out_features: int | None = None
) -> np.ndarray:
    return x @ dense(a, b)[:out_features, : x.shape[-1]].T


def gradients(
    dy: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray, out_features: int | None = None
) -> Gradients:
    """By M's gradient: M[i, j] sums products of two elements, and each gets the other times it."""
    (k, q, p), (blocks, s, _) = a.shape, b.shape
    n = x.shape[-1]
    matrix_grad = np.zeros((blocks * s, k * p))
    rows, row_grads = x.reshape(-1, n), dy.reshape(-1, dy.shape[-1])
    matrix_grad[: dy.shape[-1], :n] = row_grads.T @ rows
    a_grad, b_grad = np.zeros(a.shape), np.zeros(b.shape)
    for t in range(k * q):
        first, second = divmod(t, q), divmod(t, blocks)
        columns = slice(first[0] * p, (first[0] + 1) * p)
        block = matrix_grad[second[1] :: blocks, columns]
        a_grad[first] = b[second[1], :, second[0]] @ block
        b_grad[second[1], :, second[0]] = block @ a[first]
    return dy @ dense(a, b)[: dy.shape[-1], :n], a_grad, b_grad


def _with_bias(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, bias: np.ndarray, out_features: int | None = None
) -> np.ndarray:
    return _reference(x, a, b, out_features) + bias


def _gradients_with_bias(
    dy: np.ndarray,
    x: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray,
    out_features: int | None = None,
) -> tuple[np.ndarray, ...]:
    return *gradients(dy, x, a, b, out_features), dy.reshape(-1, len(bias)).sum(axis=0)


def _layer(name: str, rows: tuple[int, ...], n: int, m: int, blocks: int) -> Case:
    """A layer from n to m features (the paper's, section 3.1: as many blocks in both factors)."""
    inner, outer = -(-n // blocks), -(-m // blocks)
    between = min(inner, outer)
    return case(
        name,
        (*rows, n),
        (blocks, between, inner),
        (blocks, outer, between),
        (m,),
        reduced=4 * max(inner, int(np.prod(rows))),
        out_features=m,
    )


ALL = ("float32", "float64", "bfloat16")

RECORDS = [
    Record(
        name="monarch_multiply",
        operators=(
            "oneflow_accel_monarch",
            "oneflow_accel_monarch_keeping",
            "oneflow_accel_monarch_grad",
        ),
        call=monarch_multiply,
        not_finite=Strictness.REGROUPED,
        reference=_reference,
        gradient=gradients,
        cases=[
            case("one value", (1, 1), (1, 1, 1), (1, 1, 1)),
            case("one row", (6,), (2, 3, 3), (3, 2, 2), reduced=6),
            case("no row", (0, 6), (2, 3, 3), (3, 2, 2)),
            case("square", (2, 3, 4), (2, 2, 2), (2, 2, 2), reduced=6),
            case("odd", (2, 9, 15), (5, 7, 3), (5, 2, 7), reduced=40),
            case("more blocks after", (21, 18), (6, 4, 3), (8, 5, 3), reduced=40),
            case("few blocks after", (19, 4), (1, 6, 4), (3, 2, 2), reduced=40),
            case("wide", (37, 136), (2, 130, 68), (4, 70, 65), reduced=136),
            case("whole vectors", (33, 128), (4, 64, 32), (4, 48, 64), reduced=128),
            case("global", (2, 6, 12), (3, 4, 4), (2, 5, 6), reduced=12),
        ],
        layouts=[
            Layout(inputs=("B", "B", "B"), output="B"),
            Layout(inputs=("S(0)", "B", "B"), output="S(0)"),
            Layout(inputs=("S(1)", "B", "B"), output="S(1)"),
        ],
        dtypes=ALL,
        gradient_dtypes=ALL,
    ),
    Record(
        name="monarch_multiply_bias",
        operators=("oneflow_accel_monarch",),
        call=monarch_multiply,
        not_finite=Strictness.REGROUPED,
        reference=_with_bias,
        gradient=_gradients_with_bias,
        cases=[
            _layer("smaller", (5,), 10, 7, 4),
            _layer("larger", (3, 3), 7, 10, 4),
            # A last block of x of which there is nothing, and blocks of y without a row.
            _layer("short", (11,), 5, 3, 8),
            _layer("more blocks than values", (150,), 197, 384, 16),
            # Above a tile of rows, and above one of columns, by a little.
            _layer("tiles", (300,), 96, 1200, 4),
            _layer("many rows", (2100,), 40, 24, 2),
            _layer("global", (2, 4), 9, 10, 4),
        ],
        layouts=[
            Layout(inputs=("B", "B", "B", "B"), output="B"),
            Layout(inputs=("S(0)", "B", "B", "B"), output="S(0)"),
        ],
        dtypes=ALL,
        gradient_dtypes=ALL,
    ),
]
