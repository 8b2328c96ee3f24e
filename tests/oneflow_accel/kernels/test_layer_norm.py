"""layer_norm and rms_norm beyond records: stability, NaN, residuals, bfloat16, threads."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import (
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
