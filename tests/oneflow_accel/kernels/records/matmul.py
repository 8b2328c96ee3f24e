"""Matrix products: plain, batched, with batch dimensions that broadcast, and with a bias."""

from __future__ import annotations

from collections.abc import Sequence

from oneflow_accel.kernels.operators import Operator

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Case, Layout, Record, Shape, case

# flow._C.fused_matmul_bias runs this operator on CUDA devices only.
_fused_matmul_bias = Operator(
    "fused_matmul_bias",
    inputs=("x", "weight", "bias", "_add_to_output"),
    outputs=("out",),
    optional=("_add_to_output",),
)
DTYPES = ("float32", "bfloat16")


def transposed(x: np.ndarray, transpose: bool) -> np.ndarray:
    return np.swapaxes(x, -1, -2) if transpose else x


def summed_to(x: np.ndarray, shape: Shape) -> np.ndarray:
    """The gradient of an array of `shape` that was broadcast to the shape of `x`."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    repeated = [axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1]
    return x.sum(axis=tuple(repeated), keepdims=True)


def product(
    a: flow.Tensor,
    b: flow.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
) -> flow.Tensor:
    return flow._C.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, alpha=alpha)


def product_reference(
    a: np.ndarray,
    b: np.ndarray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
) -> np.ndarray:
    return alpha * (transposed(a, transpose_a) @ transposed(b, transpose_b))


def product_gradient(
    dy: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    da = alpha * (dy @ np.swapaxes(transposed(b, transpose_b), -1, -2))
    db = alpha * (np.swapaxes(transposed(a, transpose_a), -1, -2) @ dy)
    return (
        summed_to(transposed(da, transpose_a), a.shape),
        summed_to(transposed(db, transpose_b), b.shape),
    )


def forms(name: str, a: Shape, b: Shape, reduced: int, alpha: float = 1.0) -> list[Case]:
    """(..., M, K) times (..., K, N) with each operand stored as it is and transposed."""
    return [
        case(
            name + ("-a^T" if transpose_a else "") + ("-b^T" if transpose_b else ""),
            (*a[:-2], a[-1], a[-2]) if transpose_a else a,
            (*b[:-2], b[-1], b[-2]) if transpose_b else b,
            reduced=reduced,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            alpha=alpha,
        )
        for transpose_a in (False, True)
        for transpose_b in (False, True)
    ]


def product_record(
    name: str, operators: Sequence[str], cases: Sequence[Case], layouts: Sequence[Layout]
) -> Record:
    return Record(
        name=name,
        operators=tuple(operators),
        call=product,
        reference=product_reference,
        gradient=product_gradient,
        cases=cases,
        layouts=layouts,
        dtypes=DTYPES,
    )


def linear(x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor) -> flow.Tensor:
    return _fused_matmul_bias(x, weight, bias, None)[0]


def linear_reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return x @ weight.T + bias


def linear_gradient(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = int(np.prod(dy.shape[:-1]))
    rows = dy.reshape(count, dy.shape[-1])
    return dy @ weight, rows.T @ x.reshape(count, x.shape[-1]), rows.sum(axis=0)


RECORDS = [
    product_record(
        "matmul",
        ["matmul"],
        [
            *forms("odd", (3, 5), (5, 7), reduced=5, alpha=-0.5),
            *forms("threads", (131, 257), (257, 67), reduced=257),
            *forms("row", (1, 300), (300, 513), reduced=513),
            # Up to 8 rows have a kernel of their own, made for each number of rows.
            *(
                case(
                    f"{m}-rows{'-b^T' * transpose_b}",
                    (m, 83),
                    (605, 83) if transpose_b else (83, 605),
                    reduced=605,
                    transpose_b=transpose_b,
                    alpha=-0.5,
                )
                for m in range(2, 10)
                for transpose_b in (False, True)
            ),
            case("one", (1, 1), (1, 1)),
            case("no-rows", (0, 5), (5, 3)),
            case("no-columns", (3, 5), (5, 0)),
            case("nothing-to-add-up", (3, 0), (0, 4)),
            case("global", (4, 6), (6, 8), reduced=8),
        ],
        [
            Layout(("S(0)", "B"), "S(0)"),
            Layout(("B", "S(1)"), "S(1)"),
            Layout(("S(1)", "S(0)"), "P"),
        ],
    ),
    product_record(
        "batch_matmul",
        ["batch_matmul"],
        [
            *forms("odd", (3, 2, 5), (3, 5, 7), reduced=7, alpha=0.125),
            *forms("heads", (2, 6, 33, 16), (2, 6, 16, 29), reduced=33),
            # Fewer matrices than it takes to give each thread its own.
            *forms("three-large", (3, 65, 70), (3, 70, 51), reduced=70),
            case("no-matrices", (2, 0, 3, 5), (2, 0, 5, 4)),
            case("no-rows", (2, 0, 5), (2, 5, 3)),
            case("nothing-to-add-up", (2, 3, 0), (2, 0, 5)),
            case("global", (4, 2, 6), (4, 6, 8), reduced=8),
        ],
        [
            Layout(("S(0)", "S(0)"), "S(0)"),
            Layout(("S(1)", "B"), "S(1)"),
            Layout(("B", "S(2)"), "S(2)"),
            Layout(("S(2)", "S(1)"), "P"),
        ],
    ),
    product_record(
        "broadcast_matmul",
        ["broadcast_matmul", "broadcast_matmul_grad_b"],
        [
            *(
                one
                for one in forms("one-b", (2, 3, 4, 5), (5, 7), reduced=24, alpha=3.0)
                if not one.attributes["transpose_a"]
            ),
            *forms("one-a", (4, 5), (3, 5, 7), reduced=21),
            *forms("both", (2, 1, 3, 5), (4, 5, 2), reduced=12),
            *forms("threads", (4, 1, 33, 40), (1, 6, 40, 31), reduced=240),
            case("no-rows", (2, 0, 5), (5, 4)),
            case("nothing-to-add-up", (2, 3, 0), (0, 4)),
            case("global", (4, 2, 6), (6, 8), reduced=8),
        ],
        [
            Layout(("S(0)", "B"), "S(0)"),
            Layout(("S(1)", "B"), "S(1)"),
            Layout(("B", "S(1)"), "S(2)"),
            Layout(("S(2)", "S(0)"), "P"),
        ],
    ),
    # oneflow 0.9.0 gets this form's gradient wrong: it does not sum that of b over the batch.
    Record(
        name="broadcast_matmul_of_transposed_a_and_one_b",
        operators=("broadcast_matmul",),
        call=product,
        reference=product_reference,
        cases=[
            one
            for one in forms("one-b", (2, 3, 4, 5), (5, 7), reduced=5, alpha=3.0)
            if one.attributes["transpose_a"]
        ],
        dtypes=DTYPES,
    ),
    Record(
        name="fused_matmul_bias",
        operators=("fused_matmul_bias", "broadcast_matmul", "broadcast_matmul_grad_b"),
        call=linear,
        reference=linear_reference,
        gradient=linear_gradient,
        cases=[
            case("odd", (5, 3), (7, 3), (7,), reduced=7),
            case("three-axes", (2, 3, 5), (4, 5), (4,), reduced=6),
            case("four-axes", (2, 3, 4, 5), (6, 5), (6,), reduced=24),
            case("rows", (2, 70, 33), (65, 33), (65,), reduced=140),
            case("few-rows", (1, 3, 131), (203, 131), (203,), reduced=203),
            case("wide", (64, 3), (16411, 3), (16411,), reduced=16411),
            case("no-rows", (0, 3), (4, 3), (4,)),
            case("no-columns", (3, 2), (0, 2), (0,)),
            case("nothing-to-add-up", (2, 3, 0), (4, 0), (4,), reduced=6),
            case("global", (4, 2, 6), (8, 6), (8,), reduced=8),
        ],
        layouts=[
            Layout(("S(0)", "B", "B"), "S(0)"),
            Layout(("S(1)", "B", "B"), "S(1)"),
            Layout(("B", "S(0)", "S(0)"), "S(2)"),
            Layout(("S(2)", "S(1)", "P"), "P"),
        ],
        dtypes=DTYPES,
    ),
]
