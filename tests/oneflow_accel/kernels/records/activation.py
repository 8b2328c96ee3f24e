"""Activations and the sum of equal shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Case, Layout, Record, case

# At, below and above what one SIMD register and one thread take.
CASES = [
    case("0-d", ()),
    case("empty", (0, 3)),
    case("one", (1,)),
    case("odd", (3, 17)),
    case("threads", (100003,)),
    case("global", (4, 6)),
    # Where the approximations are level, and beyond.
    case("wide", lambda generator: generator.uniform(-30, 30, 4001)),
]
# x itself on the right; 0 on the left, and no error that grows with x.
FAR = case("far", lambda generator: np.repeat([-1e6, -1e3, -200.0, 200.0, 1e3, 1e6], 97))
BOTH = ("float32", "bfloat16")
LINES = [Layout(("S(0)",), "S(0)"), Layout(("S(1)",), "S(1)"), Layout(("B",), "B")]
# The constant of OneFlow's and ONNX Runtime's fast_gelu.
CUBIC = 0.044714998453855515

Array = np.ndarray


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _normal(x: Array) -> Array:
    erf = np.frompyfunc(math.erf, 1, 1)
    return 0.5 * (1.0 + np.asarray(erf(x / math.sqrt(2.0)), dtype=np.float64))


def _density(x: Array) -> Array:
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gated(
    u: Callable[[Array], Array], slope: Callable[[Array], Array]
) -> tuple[Callable[[Array], Array], Callable[[Array, Array], tuple[Array]]]:
    """x sigmoid(u(x)) and its gradient."""

    def gradient(dy: Array, x: Array) -> tuple[Array]:
        s = _sigmoid(u(x))
        return (dy * (s + x * slope(x) * s * (1.0 - s)),)

    return lambda x: x * _sigmoid(u(x)), gradient


ROOT = 2.0 * math.sqrt(2.0 / math.pi)
FAST_GELU, FAST_GELU_GRADIENT = _gated(
    lambda x: ROOT * (x + CUBIC * x**3), lambda x: ROOT * (1.0 + 3.0 * CUBIC * x**2)
)
QUICK_GELU, QUICK_GELU_GRADIENT = _gated(lambda x: 1.702 * x, lambda x: np.full_like(x, 1.702))
SILU, SILU_GRADIENT = _gated(lambda x: x, np.ones_like)


def _same(name: str, terms: int, *shape: int) -> Case:
    return case(name, *[shape] * terms, reduced=terms)


def _residual_in_place(x: flow.Tensor) -> flow.Tensor:
    """x is used twice, so that its gradients are added up."""
    out = x * 3.0
    out += x
    return out


def _sum(*terms: flow.Tensor) -> flow.Tensor:
    return flow._C.add(list(terms), inplace=False)


def _record(
    name: str,
    call: Callable[[flow.Tensor], flow.Tensor],
    reference: Callable[[Array], Array],
    gradient: Callable[[Array, Array], tuple[Array]],
    operator: str = "",
    more: tuple[Case, ...] = (),
) -> Record:
    operators = (operator or name, f"{operator or name}_grad")
    return Record(
        name,
        operators,
        call,
        reference,
        [*CASES, *([] if name in ("tanh", "sigmoid") else [FAR]), *more],
        gradient=gradient,
        layouts=LINES,
        dtypes=BOTH,
    )


RECORDS = [
    _record(
        "relu",
        flow.relu,
        lambda x: np.maximum(x, 0),
        # Where x is NaN the gradient passes, as in PyTorch.
        lambda dy, x: (np.where(x <= 0, 0, dy),),
        more=(case("prime", (1000003,)),),
    ),
    _record(
        "relu_in_place",
        # A leaf that needs a gradient cannot be changed in place.
        lambda x: flow.nn.functional.relu(x * 1.0, inplace=True),
        lambda x: np.maximum(x, 0),
        lambda dy, x: (np.where(x <= 0, 0, dy),),
        operator="relu",
    ),
    _record(
        "gelu",
        flow._C.gelu,
        lambda x: x * _normal(x),
        lambda dy, x: (dy * (_normal(x) + x * _density(x)),),
    ),
    _record(
        "gelu_tanh",
        lambda x: flow._C.gelu_with_approximate(x, "tanh"),
        FAST_GELU,
        FAST_GELU_GRADIENT,
        operator="fast_gelu",
    ),
    _record("quick_gelu", flow._C.quick_gelu, QUICK_GELU, QUICK_GELU_GRADIENT),
    _record("silu", flow._C.silu, SILU, SILU_GRADIENT),
    _record("tanh", flow.tanh, np.tanh, lambda dy, x: (dy / np.cosh(x) ** 2,)),
    _record("sigmoid", flow.sigmoid, _sigmoid, lambda dy, x: (dy * _sigmoid(x) * _sigmoid(-x),)),
    Record(
        "add",
        ("add_n",),
        lambda x, y: x + y,
        lambda x, y: x + y,
        [
            _same("0-d", 2),
            _same("empty", 2, 0, 3),
            _same("odd", 2, 3, 17),
            _same("threads", 2, 100003),
            _same("global", 2, 4, 6),
        ],
        gradient=lambda dy, x, y: (dy, dy),
        layouts=[Layout(("P", "P"), "P"), Layout(("S(0)", "S(0)"), "S(0)")],
        dtypes=BOTH,
    ),
    Record(
        "residual_in_place",
        ("add_n",),
        _residual_in_place,
        lambda x: 4 * x,
        CASES,
        gradient=lambda dy, x: (4 * dy,),
        layouts=LINES,
    ),
    Record(
        "add_many",
        ("add_n",),
        _sum,
        lambda *terms: np.sum(terms, axis=0),
        [
            _same("three", 3, 5, 7),
            _same("five", 5, 3, 17),
            _same("threads", 4, 50021),
            _same("global", 3, 4, 6),
        ],
        gradient=lambda dy, *terms: (dy,) * len(terms),
        layouts=[Layout(("P", "P", "P"), "P"), Layout(("S(1)", "S(1)", "S(1)"), "S(1)")],
        dtypes=BOTH,
    ),
]
