"""The fused operators with dropout, in nn.Graph and as LiBai's layers call them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)
from tests.oneflow_accel.kernels.mersenne import Masks
from tests.oneflow_accel.kernels.records.fused import kept_by_tril, softmax, softmax_gradient
from tests.tolerances import assert_close

pytestmark = needs_plugin

RATE = 0.3
SEED = 21
SHAPE = (2, 3, 40, 41)
Call = Callable[[flow.Tensor], flow.Tensor]


def keep_and_scale(shape: tuple[int, ...]) -> np.ndarray:
    """What random_mask_like after manual_seed(SEED) multiplies with."""
    return Masks(SEED).mask_like(shape, RATE) / (1 - np.float64(np.float32(RATE)))


def run(call: Callable[..., flow.Tensor], *arrays: np.ndarray) -> tuple[np.ndarray, list]:
    """y and the gradients of sum(y * dy) by each array, drawn after manual_seed(SEED)."""
    tensors = [flow.tensor(array, requires_grad=True) for array in arrays]
    flow.manual_seed(SEED)
    y = call(*tensors)
    y.backward(flow.tensor(random(*y.shape, seed=9)))
    return y.numpy(), [tensor.grad.numpy() for tensor in tensors]


@pytest.mark.parametrize("axis", [1, -1])
def test_bias_add_dropout(axis: int) -> None:
    a, b = random(*SHAPE), random(SHAPE[axis], seed=1)
    y, (da, db) = run(lambda a, b: flow._C.fused_bias_add_dropout(a, b, p=RATE, axis=axis), a, b)
    factor = keep_and_scale(SHAPE)
    along = [1] * 4
    along[axis] = -1
    assert_close(y, (a.astype(np.float64) + b.reshape(along)) * factor)
    expected = random(*SHAPE, seed=9) * factor
    assert_close(da, expected)
    others = tuple(i for i in range(4) if i != axis % 4)
    assert_close(db, expected.sum(axis=others), reduced=a.size // b.size)


def test_bias_add_dropout_adds_the_residual_in_a_graph() -> None:
    """With fuse_add_to_output the addition becomes an input of the operator."""
    a, b, residual = random(4, 50, 33), random(33, seed=1), random(4, 50, 33, seed=2)

    class Graph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.config.allow_fuse_add_to_output(True)

        def build(self, a: flow.Tensor, b: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
            return flow._C.fused_bias_add_dropout(a * 1.0, b, p=RATE, axis=2) + residual * 1.0

    flow.manual_seed(SEED)
    graph = Graph()
    y = graph(flow.tensor(a), flow.tensor(b), flow.tensor(residual))
    assert "_add_to_output" in str(graph._full_job_proto)
    factor = keep_and_scale(a.shape)
    assert_close(y.numpy(), (a.astype(np.float64) + b) * factor + residual)


def masked_softmax_dropout(
    x: np.ndarray, mask: np.ndarray, fill: float, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The output of softmax and dropout, and the gradient by x."""
    factor = keep_and_scale(x.shape)
    y = softmax(np.where(mask, x.astype(np.float64) * scale, fill))
    dx = softmax_gradient(random(*x.shape, seed=9) * factor, y)
    return y * factor, np.where(mask, dx * scale, 0.0)


def test_scale_mask_softmax_dropout() -> None:
    x, mask = random(*SHAPE), random(2, 1, 40, 41, seed=1) > -0.5
    y, (dx,) = run(
        lambda x: flow._C.fused_scale_mask_softmax_dropout(
            x, flow.tensor(mask), fill_value=-1e4, scale=0.5, p=RATE
        )[0],
        x,
    )
    expected, gradient = masked_softmax_dropout(x, mask, -1e4, 0.5)
    assert_close(y, expected)
    assert_close(dx, gradient)


def test_bias_add_scale_mask_softmax_dropout() -> None:
    x, bias = random(*SHAPE), random(1, 3, 40, 41, seed=3)
    mask = random(2, 1, 40, 41, seed=1) > -0.5
    y, (dx, dbias) = run(
        lambda x, bias: flow._C.fused_bias_add_scale_mask_softmax_dropout(
            x, bias, flow.tensor(mask), fill_value=-1e4, scale=0.5, p=RATE
        )[0],
        x,
        bias,
    )
    expected, gradient = masked_softmax_dropout(x.astype(np.float64) + bias, mask, -1e4, 0.5)
    assert_close(y, expected)
    assert_close(dx, gradient)
    assert_close(dbias, gradient.sum(axis=0, keepdims=True), reduced=2)


def test_causal_softmax_dropout() -> None:
    x = random(*SHAPE)
    y, (dx,) = run(
        lambda x: flow._C.fused_scale_tril_softmax_mask_scale(
            x, p=RATE, diagonal=0, tril_scale_value=0.5, tril_fill_value=-1e4
        )[0],
        x,
    )
    expected, gradient = masked_softmax_dropout(x, kept_by_tril(x, 0), -1e4, 0.5)
    assert_close(y, expected)
    assert_close(dx, gradient)


def test_softmax_with_nothing_but_the_mask() -> None:
    """A row without a true element is uniform, and has no gradient."""
    x, mask = random(2, 3, 7), np.zeros((2, 3, 7), bool)
    y, (dx,) = run(
        lambda x: flow._C.fused_scale_mask_softmax(x, flow.tensor(mask), fill_value=-1e4), x
    )
    assert_close(y, np.full((2, 3, 7), 1 / 7))
    np.testing.assert_array_equal(dx, 0.0)


def test_a_mask_that_does_not_fit_ends_the_process() -> None:
    code = (
        "import oneflow_accel, oneflow as flow\n"
        "mask = flow.ones(2, 1, 4, 5, dtype=flow.bool)\n"
        "print(flow._C.fused_scale_mask_softmax(flow.ones(3, 1, 4, 5), mask).numpy())\n"
    )
    result = run_process(["-c", code])
    assert result.returncode != 0
    assert "a mask or bias of shape (2,1,4,5) cannot be broadcast to (3,1,4,5)" in result.stdout


_GRAPH_CALLS: dict[str, Call] = {
    "bias_add_dropout": lambda x: flow._C.fused_bias_add_dropout(x, x[0, 0, 0], p=RATE, axis=3),
    "masked_softmax_dropout": lambda x: flow._C.fused_scale_mask_softmax_dropout(
        x, x > 0, fill_value=-1e4, scale=0.5, p=RATE
    )[0],
    "causal_softmax_dropout": lambda x: flow._C.fused_scale_tril_softmax_mask_scale(
        x, p=RATE, diagonal=0, tril_scale_value=0.5, tril_fill_value=-1e4
    )[0],
}


@pytest.mark.parametrize("name", list(_GRAPH_CALLS))
def test_graph_draws_what_eager_draws_after_the_seed(name: str) -> None:
    call = _GRAPH_CALLS[name]

    class Graph(nn.Graph):
        def build(self, x: flow.Tensor) -> flow.Tensor:
            return call(x * 1.0)

    x = random(*SHAPE)
    flow.manual_seed(SEED)
    eager = call(flow.tensor(x)).numpy()
    flow.manual_seed(SEED)
    np.testing.assert_array_equal(Graph()(flow.tensor(x)).numpy(), eager)
