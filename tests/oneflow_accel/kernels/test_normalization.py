"""Batch normalization beyond its records: running statistics, large means, graphs."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import gradients, needs_plugin, random
from tests.oneflow_accel.kernels.records.batch_norm import (
    EPSILON,
    MOMENTUM,
    SHAPES,
    batch_norm,
    batch_norm_add_relu,
    batch_statistics,
    gradient,
    reference,
)
from tests.tolerances import Tolerance, assert_close

pytestmark = needs_plugin


@pytest.mark.parametrize("norm", [batch_norm, batch_norm_add_relu])
@pytest.mark.parametrize("name", [name for name in SHAPES if "empty" not in name])
def test_running_statistics_take_the_unbiased_variance(name: str, norm: object) -> None:
    shape, axis = SHAPES[name]
    x, channels = random(*shape), shape[axis]
    gamma, beta, mean_before = (random(channels, seed=seed) for seed in (3, 4, 6))
    statistics = flow.tensor(mean_before), flow.ones(channels)

    norm(*map(flow.tensor, (x, gamma, beta)), axis=axis, statistics=statistics)

    mean, variance = batch_statistics(x.astype(np.float64), axis)
    count = x.size // channels
    unbiased = variance * count / (count - 1)
    assert_close(statistics[0].numpy(), mean_before * (1 - MOMENTUM) + mean * MOMENTUM)
    assert_close(statistics[1].numpy(), 1 - MOMENTUM + unbiased * MOMENTUM)


@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_leaves_running_statistics(training: bool) -> None:
    statistics = flow.zeros(3), flow.ones(3)
    x, ones = flow.zeros(0, 3, 4, 4), flow.ones(3)
    batch_norm(x, ones, ones, 1, statistics, training)
    np.testing.assert_array_equal(statistics[0].numpy(), np.zeros(3))
    np.testing.assert_array_equal(statistics[1].numpy(), np.ones(3))


@pytest.mark.parametrize(("shape", "axis"), [((16, 4, 20, 20), 1), ((16, 20, 20, 4), 3)])
def test_mean_large_against_the_standard_deviation(shape: tuple[int, ...], axis: int) -> None:
    x = random(*shape) + np.float32(1000)
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    dy = random(*shape, seed=5)
    variance = flow.zeros(4)

    y, grads = gradients(
        lambda *a: batch_norm(*a, axis=axis, statistics=(flow.zeros(4), variance)),
        [x, gamma, beta],
        dy,
    )

    wide = [array.astype(np.float64) for array in (x, gamma, beta)]
    count = x.size // 4
    assert_close(y, reference(*wide, axis))
    unbiased = batch_statistics(wide[0], axis)[1] * count / (count - 1)
    assert_close(variance.numpy(), unbiased * MOMENTUM)
    # The operator hands the mean to the gradient in float32: 6e-5 / 2 off for a mean of 1000.
    rounding = Tolerance(rtol=2e-5, atol=4e-5)
    for actual, expected in zip(grads, gradient(dy.astype(np.float64), *wide, axis), strict=True):
        assert_close(
            actual,
            expected,
            reduced=count,
            override=rounding,
            reason="the saved mean is rounded to float32",
        )


@pytest.mark.parametrize(("shape", "axis"), [((1, 2), 1), ((1, 1, 1, 2), 3)])
def test_one_element_per_channel_keeps_running_statistics_finite(
    shape: tuple[int, ...], axis: int
) -> None:
    x = np.array([3.0, -2.0], np.float32).reshape(shape)
    beta = np.array([0.5, 1.5], np.float32)
    mean, variance = flow.zeros(2), flow.ones(2)
    y = batch_norm(flow.tensor(x), flow.ones(2), flow.tensor(beta), axis, (mean, variance))
    np.testing.assert_array_equal(y.numpy().ravel(), beta)
    assert_close(mean.numpy(), np.array([0.3, -0.2]))
    assert_close(variance.numpy(), np.array([0.9, 0.9]))  # a single value varies by 0


@pytest.mark.parametrize("training", [True, False])
def test_addition_fused_by_the_graph(training: bool) -> None:
    """The graph compiler folds `norm(x) + z` into the operator's input `_add_to_output`."""
    shape, axis = SHAPES["nhwc"]
    x, z, gamma, beta = random(*shape), random(*shape, seed=8), random(5, seed=3), random(5, seed=4)
    norm = nn.BatchNorm2d(5, eps=EPSILON)
    norm.channel_axis = axis
    norm.weight.data.copy_(flow.tensor(gamma))
    norm.bias.data.copy_(flow.tensor(beta))
    norm.train(training)

    class Fused(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm
            self.config.allow_fuse_add_to_output(True)

        def build(self, x: flow.Tensor, z: flow.Tensor) -> flow.Tensor:
            return self.norm(x) + z * 1.0

    graph = Fused()
    with flow.no_grad():
        y = graph(flow.tensor(x), flow.tensor(z)).numpy()
    operators = [op.user_conf.op_type_name for op in graph._full_graph_proto.net.op]
    assert "normalization" in operators
    assert "add_n" not in operators
    if training:
        expected = reference(*(array.astype(np.float64) for array in (x, gamma, beta)), axis)
    else:
        expected = x.astype(np.float64) / np.sqrt(1 + EPSILON) * gamma + beta
    assert_close(y, expected + z)
