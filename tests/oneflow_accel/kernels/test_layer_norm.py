"""layer_norm and rms_norm beyond records: stability, NaN, residuals, bfloat16, threads."""

from __future__ import annotations

from oneflow_accel.backends.cpu import CpuBackend

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import (
    assert_eager_equals_graph,
    assert_same_for_any_number_of_threads,
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


def layer_norm(x: flow.Tensor, *gamma_beta: flow.Tensor) -> flow.Tensor:
    return nn.functional.layer_norm(x, (x.shape[-1],), *gamma_beta)


def normalized(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def test_the_cpu_backend_has_native_layer_norm() -> None:
    assert CpuBackend().supports("native_layer_norm")


def test_nn_layer_norm_is_one_operator_in_a_graph() -> None:
    class Forward(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def build(self, x: flow.Tensor) -> flow.Tensor:
            return self.norm(x)

    graph = Forward()
    y = graph(flow.tensor(random(3, 8)))
    operators = [op.user_conf.op_type_name for op in graph._full_graph_proto.net.op]
    assert operators.count("layer_norm") == 1
    assert "reduce_mean" not in operators
    assert_close(y.numpy(), normalized(random(3, 8)), reduced=8)


@pytest.mark.parametrize("mean", [1e3, 1e4, -1e6])
def test_the_output_is_exact_where_the_mean_is_large(mean: float) -> None:
    """float64 knows the mean; what float32 rounds of it is as large as the last one's deviation."""
    x = (random(16, 384) + mean).astype(np.float32)
    assert_close(layer_norm(flow.tensor(x)).numpy(), normalized(x), reduced=384)


def test_a_constant_row_is_zero() -> None:
    y = layer_norm(flow.tensor(np.full((4, 1000), 3.7, np.float32))).numpy()
    np.testing.assert_array_equal(y, np.zeros((4, 1000)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(bad: float) -> None:
    x = random(5, 40)
    clean = layer_norm(flow.tensor(x)).numpy()
    x[2, 7] = bad
    y = layer_norm(flow.tensor(x)).numpy()
    assert np.isnan(y[2]).all()
    np.testing.assert_array_equal(np.delete(y, 2, axis=0), np.delete(clean, 2, axis=0))


def test_frozen_parameters_leave_the_gradient_of_the_input() -> None:
    norm = nn.LayerNorm(24)
    for parameter in norm.parameters():
        parameter.requires_grad = False
    weight = random(6, 24, seed=1)
    (dx,) = gradients(norm, [random(6, 24)], weight)[1]
    expected = gradients(layer_norm, [random(6, 24)], weight)[1][0]
    np.testing.assert_array_equal(dx, expected)


def test_a_residual_connection_is_the_same_in_a_graph() -> None:
    """There the compiler hands the other gradient of x to layer_norm_grad as _add_to_output."""

    def block(x: flow.Tensor, gamma: flow.Tensor, beta: flow.Tensor) -> flow.Tensor:
        return x + layer_norm(x, gamma, beta) * 0.5

    assert_eager_equals_graph(block, [random(6, 48), random(48), random(48)], random(6, 48, seed=2))


def test_bfloat16_keeps_its_statistics_in_float32() -> None:
    x, gamma, beta = (
        flow.tensor(array).to(flow.bfloat16) for array in (random(7, 300), random(300), random(300))
    )
    y = flow._C.layer_norm_affine(
        x, gamma, beta, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-5
    )
    assert y.dtype == flow.bfloat16
    exact = [tensor.to(flow.float32).numpy() for tensor in (x, gamma, beta)]
    expected = normalized(exact[0]) * exact[1] + exact[2]
    assert_close(y.to(flow.float32).numpy(), expected, dtype="bfloat16")


_DIGEST = """
import hashlib, sys
import oneflow_accel
import oneflow as flow
flow.manual_seed(3)
digest = hashlib.sha256()
for rows, n in ((3, 5000), (1000, 96), (77, 33)):
    x = flow.randn(rows, n, requires_grad=True)
    norm = flow.nn.LayerNorm(n)
    y = norm(x) + flow.nn.RMSNorm(n)(x)
    (y * flow.randn(rows, n)).sum().backward()
    for tensor in (y, x.grad, norm.weight.grad, norm.bias.grad):
        digest.update(tensor.numpy().tobytes())
print("result", digest.hexdigest())
"""


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    assert_same_for_any_number_of_threads(_DIGEST)
