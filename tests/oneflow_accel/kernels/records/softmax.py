"""softmax and log_softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Layout, Record, case


def _softmax(x: np.ndarray, dim: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def _softmax_grad(dy: np.ndarray, x: np.ndarray, dim: int = -1) -> tuple[np.ndarray]:
    y = _softmax(x, dim)
    return (y * (dy - (dy * y).sum(dim, keepdims=True)),)


def _log_softmax(x: np.ndarray, dim: int = -1) -> np.ndarray:
    shifted = x - x.max(dim, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(dim, keepdims=True))


def _log_softmax_grad(dy: np.ndarray, x: np.ndarray, dim: int = -1) -> tuple[np.ndarray]:
    return (dy - _softmax(x, dim) * dy.sum(dim, keepdims=True),)


def _spread(*shape: int) -> Any:
    """Rows whose exponentials overflow without a shift, and underflow with it."""
    return lambda generator: generator.standard_normal(shape) * 60.0 + 100.0


def _masked(*shape: int) -> Any:
    """Every second element is out of the sum, and the whole last row."""

    def make(generator: np.random.Generator) -> np.ndarray:
        x = generator.standard_normal(shape)
        x[:, 1::2] = x[-1] = -np.inf
        return x

    return make


CASES = (
    case("global", (4, 6, 10), reduced=10),
    case("one_column", (5, 1)),
    case("three_columns", (7, 3), reduced=3),
    case("vector", (17,), reduced=17),
    case("one_vector_and_one_more", (2, 33), reduced=33),
    case("middle_axis", (3, 5, 4), dim=1, reduced=5),
    case("attention", (2, 3, 197, 197), reduced=197),
    case("longest_short_row", (3, 2048), reduced=2048),
    case("vocabulary", (2, 50257), reduced=50257),
    case("spread", _spread(9, 50), reduced=50),
    case("empty", (0, 8)),
    # In rows that are padded to whole vectors, and in those that are too long for it.
    *(case(f"masked {n}", _masked(64, n), reduced=n) for n in (13, 16, 197)),
    *(case(f"masked {n}", _masked(5, n), reduced=n) for n in (2049, 6000)),
)
BOTH = ("float32", "bfloat16")
LAYOUTS = (Layout(("S(0)",), "S(0)"), Layout(("S(1)",), "S(1)"), Layout(("B",), "B"))

RECORDS = [
    Record(
        "softmax",
        ("softmax", "softmax_grad"),
        lambda x, dim=-1: flow.softmax(x, dim),
        _softmax,
        CASES,
        gradient=_softmax_grad,
        layouts=LAYOUTS,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        "log_softmax",
        ("log_softmax", "log_softmax_grad"),
        lambda x, dim=-1: flow.log_softmax(x, dim),
        _log_softmax,
        CASES,
        gradient=_log_softmax_grad,
        layouts=LAYOUTS,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
]
