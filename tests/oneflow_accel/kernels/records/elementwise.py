"""Arithmetic on shapes that broadcast and with numbers, unary functions, conversion of types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Case, Input, Layout, Record, Shape, case

Array = np.ndarray
BOTH = ("float32", "bfloat16")
LINES = [Layout(("S(0)",), "S(0)"), Layout(("S(1)",), "S(1)"), Layout(("B",), "B")]
# A row, a column and a number along a split matrix.
BROADCAST_LINES = [
    Layout(("S(0)", "B"), "S(0)"),
    Layout(("S(1)", "S(0)"), "S(1)"),
    Layout(("B", "B"), "B"),
]

# (name, shape of x, shape of y): what broadcasts, and how.
SHAPES: list[tuple[str, Shape, Shape]] = [
    ("equal", (3, 17), (3, 17)),
    ("0-d", (), ()),
    ("number", (5, 33), ()),
    ("number-on-the-left", (), (5, 33)),
    ("number-of-rank", (5, 33), (1, 1)),
    ("row", (7, 33), (33,)),
    ("row-on-the-left", (33,), (7, 33)),
    ("column", (7, 33), (7, 1)),
    ("column-on-the-left", (7, 1), (7, 33)),
    ("outer-product", (7, 1), (1, 33)),
    ("middle", (3, 5, 17), (3, 1, 17)),
    ("channels", (2, 5, 3, 3), (5, 1, 1)),
    ("alternating", (2, 1, 3, 1, 5), (4, 3, 6, 1)),
    ("empty", (0, 3), (3,)),
    ("threads", (301, 337), (337,)),
    ("threads-number", (100003,), (1,)),
    ("threads-column", (331, 303), (331, 1)),
    ("threads-odd", (97, 3, 401), (97, 1, 401)),
    ("global", (4, 6), (6,)),
]

# The operators share the code that broadcasts: all shapes for one of them, these for the others.
SOME_SHAPES = {"equal", "0-d", "number", "row-on-the-left", "alternating", "empty", "threads-odd"}
SOME_SHAPES |= {"threads-number", "threads-column", "global"}


def _positive(*shape: int) -> Input:
    return lambda generator: generator.uniform(0.5, 2.0, shape)


def _reduce_to(gradient: Array, like: Array) -> Array:
    front = gradient.ndim - like.ndim
    gradient = gradient.sum(axis=tuple(range(front)))
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1 and gradient.shape[i] != 1)
    return gradient.sum(axis=axes, keepdims=True)


def _broadcast_cases(all_shapes: bool, positive_divisor: bool) -> list[Case]:
    cases = []
    for name, x, y in SHAPES:
        if not (all_shapes or name in SOME_SHAPES):
            continue
        z = np.broadcast_shapes(x, y)
        smallest = max(1, min(int(np.prod(x)), int(np.prod(y))))
        terms = max(1, int(np.prod(z)) // smallest)
        cases.append(case(name, x, _positive(*y) if positive_divisor else y, reduced=terms))
    return cases


def _binary(
    name: str,
    call: Callable[..., flow.Tensor],
    slope_x: Callable[[Array, Array], Array | float],
    slope_y: Callable[[Array, Array], Array | float],
    operators: tuple[str, ...],
) -> Record:
    return Record(
        name,
        operators,
        call,
        call,
        _broadcast_cases(name == "add_broadcast", positive_divisor=name == "divide"),
        gradient=lambda dy, x, y: (
            _reduce_to(dy * slope_x(x, y), x),
            _reduce_to(dy * slope_y(x, y), y),
        ),
        layouts=BROADCAST_LINES,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    )


def _unary(
    name: str,
    operators: tuple[str, ...],
    call: Callable[..., flow.Tensor],
    reference: Callable[..., Array],
    slope: Callable[..., Array | float],
    positive: bool = False,
    dtypes: tuple[str, ...] = ("float32",),
) -> Record:
    shapes = {"0-d": (), "empty": (0, 3), "odd": (3, 17), "threads": (100003,), "global": (4, 6)}
    return Record(
        name,
        operators,
        call,
        reference,
        [case(key, _positive(*shape) if positive else shape) for key, shape in shapes.items()],
        gradient=lambda dy, x: (dy * slope(x),),
        layouts=LINES,
        dtypes=dtypes,
        gradient_dtypes=(*dtypes, "float64"),
    )


def _power(exponent: float) -> Record:
    return _unary(
        f"power_{exponent}",
        ("scalar_pow", "scalar_pow_grad"),
        lambda x: x**exponent,
        # Not `**`, which takes a root for the exponent 0.5: NaN of -infinity.
        lambda x: np.power(x, exponent),
        lambda x: exponent * np.power(x, exponent - 1),
        positive=exponent not in (2, 3.0),
        dtypes=BOTH,
    )


def _to_float(name: str, values: Input) -> Record:
    return Record(
        f"float_from_{name}",
        ("cast",),
        lambda x: x.to(flow.float32),
        lambda x: x.astype(np.float64),
        [case("odd", values)],
    )


def _integers(dtype: type, low: int, high: int) -> Input:
    return lambda generator: generator.integers(low, high, (41, 1009)).astype(dtype)


RECORDS = [
    _binary(
        "add_broadcast", lambda x, y: x + y, lambda x, y: 1.0, lambda x, y: 1.0, ("broadcast_add",)
    ),
    _binary(
        "subtract", lambda x, y: x - y, lambda x, y: 1.0, lambda x, y: -1.0, ("broadcast_sub",)
    ),
    _binary("multiply", lambda x, y: x * y, lambda x, y: y, lambda x, y: x, ("broadcast_mul",)),
    _binary(
        "divide",
        lambda x, y: x / y,
        lambda x, y: 1 / y,
        lambda x, y: -x / y**2,
        ("broadcast_div", "broadcast_div_grad"),
    ),
    Record(
        "bias_add",
        ("bias_add",),
        lambda x, b, axis: flow._C.bias_add(x, b, axis=axis),
        lambda x, b, axis: x + b.reshape([-1 if i == axis else 1 for i in range(x.ndim)]),
        [
            case("rows", (7, 33), (33,), axis=1, reduced=7),
            case("columns", (7, 33), (7,), axis=0, reduced=33),
            case("channels", (2, 5, 3, 3), (5,), axis=1, reduced=18),
            case("empty", (0, 5), (5,), axis=1),
            case("threads", (301, 337), (337,), axis=1, reduced=301),
            case("global", (4, 6), (6,), axis=1, reduced=4),
        ],
        gradient=lambda dy, x, b, axis: (
            dy,
            dy.sum(axis=tuple(i for i in range(x.ndim) if i != axis)),
        ),
        layouts=BROADCAST_LINES,
        dtypes=BOTH,
    ),
    _unary(
        "add_number",
        ("scalar_add",),
        lambda x: x + 1.5,
        lambda x: x + 1.5,
        lambda x: 1.0,
        dtypes=BOTH,
    ),
    _unary(
        "subtract_from_integer",
        ("scalar_add", "scalar_mul"),
        lambda x: 2 - x,
        lambda x: 2 - x,
        lambda x: -1.0,
        dtypes=BOTH,
    ),
    _unary(
        "multiply_number",
        ("scalar_mul",),
        lambda x: x * 0.3,
        lambda x: x * 0.3,
        lambda x: 0.3,
        dtypes=BOTH,
    ),
    _unary(
        "divide_number",
        ("scalar_div",),
        lambda x: x / 3,
        lambda x: x / 3,
        lambda x: 1 / 3,
        dtypes=BOTH,
    ),
    *(_power(exponent) for exponent in (2, 3.0, 0.5, -0.5, -1.0, 1.0, 2.5)),
    _unary("square", ("square", "square_grad"), flow.square, np.square, lambda x: 2 * x),
    _unary(
        "sqrt", ("sqrt", "sqrt_grad"), flow.sqrt, np.sqrt, lambda x: 0.5 / np.sqrt(x), positive=True
    ),
    _unary(
        "rsqrt",
        ("rsqrt", "rsqrt_grad"),
        flow.rsqrt,
        lambda x: 1 / np.sqrt(x),
        lambda x: -0.5 / (x * np.sqrt(x)),
        positive=True,
    ),
    _unary(
        "reciprocal",
        ("reciprocal", "reciprocal_grad"),
        flow.reciprocal,
        lambda x: 1 / x,
        lambda x: -(x**-2.0),
        positive=True,
    ),
    _unary("exp", ("exp", "exp_grad"), flow.exp, np.exp, np.exp),
    _unary("negative", ("negative",), lambda x: -x, lambda x: -x, lambda x: -1.0),
    _to_float("int64", _integers(np.int64, -(2**40), 2**40)),
    _to_float("int32", _integers(np.int32, -(2**31), 2**31 - 1)),
    _to_float("int8", _integers(np.int8, -128, 127)),
    _to_float("uint8", _integers(np.uint8, 0, 255)),
    _to_float("bool", _integers(np.bool_, 0, 2)),
]
