"""Matrix products: what a record cannot say."""

from __future__ import annotations

from oneflow_accel.kernels.linear import linear
from oneflow_accel.kernels.operators import Operator

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin

_SUM_OPERATORS = {
    "matmul": ((5, 3), (3, 7)),
    "batch_matmul": ((2, 5, 3), (2, 3, 7)),
    "broadcast_matmul": ((2, 5, 3), (3, 7)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [3, 0])
@pytest.mark.parametrize("name", _SUM_OPERATORS)
def test_product_added_to_a_tensor(name: str, inner: int, dtype: str) -> None:
    """The input `_add_to_output`, into which nn.Graph can turn an addition."""
    operator = Operator(
        name,
        inputs=("a", "b", "_add_to_output"),
        outputs=("out",),
        attributes={"transpose_a": "bool", "transpose_b": "bool", "alpha": "double"},
    )
    a_shape, b_shape = _SUM_OPERATORS[name]
    a, b = random(*a_shape)[..., :inner], random(*b_shape, seed=1)[..., :inner, :]
    addend = random(*(a @ b).shape, seed=2)
    (y,) = operator(
        *(flow.tensor(x.copy()).to(getattr(flow, dtype)) for x in (a, b, addend)),
        transpose_a=False,
        transpose_b=False,
        alpha=-2.0,
    )
    expected = -2.0 * (a.astype(np.float64) @ b) + addend
    assert_close(y.to(flow.float32).numpy(), expected, dtype=dtype, reduced=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 70, 33), (3, 0), (6, 70)])
def test_linear_added_to_a_tensor(shape: tuple[int, ...], dtype: str) -> None:
    operator = Operator(
        "fused_matmul_bias", inputs=("x", "weight", "bias", "_add_to_output"), outputs=("out",)
    )
    x, weight, bias = random(*shape), random(65, shape[-1], seed=1), random(65, seed=2)
    addend = random(*shape[:-1], 65, seed=3)
    (y,) = operator(
        *(flow.tensor(array).to(getattr(flow, dtype)) for array in (x, weight, bias, addend))
    )
    expected = x.astype(np.float64) @ weight.T + bias + addend
    assert_close(y.to(flow.float32).numpy(), expected, dtype=dtype, reduced=shape[-1] + 2)


def test_linear_has_the_gradient_of_what_is_added() -> None:
    arrays = [random(2, 6, 5), random(7, 5, seed=1), random(7, seed=2), random(2, 6, 7, seed=3)]
    leaves = [flow.tensor(array, requires_grad=True) for array in arrays]
    dy = random(2, 6, 7, seed=4)
    linear(*leaves).backward(flow.tensor(dy))
    x, weight, _, _ = (array.astype(np.float64) for array in arrays)
    rows = dy.reshape(-1, 7).astype(np.float64)
    expected = [dy @ weight, rows.T @ x.reshape(-1, 5), rows.sum(0), dy]
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad.numpy(), gradient, reduced=12)


def test_batch_that_is_empty_on_one_side() -> None:
    """oneflow infers one matrix where a batch of none meets one of one; it holds zeros."""
    y = flow.matmul(flow.zeros(0, 3, 5), flow.tensor(random(1, 5, 4)))
    np.testing.assert_array_equal(y.numpy(), np.zeros((1, 3, 4)))
