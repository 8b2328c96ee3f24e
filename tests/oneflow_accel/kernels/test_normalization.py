"""Batch normalization: values and gradients against float64, in every layout and mode."""

from __future__ import annotations

from dataclasses import dataclass

from oneflow_accel.kernels import normalization

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import (
    as_held,
    assert_eager_equals_graph,
    assert_same_after_fork,
    assert_same_in_threads,
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import Tolerance, assert_close

pytestmark = needs_plugin

EPSILON = 1e-5
MOMENTUM = 0.1  # PyTorch's convention: moving = moving * (1 - MOMENTUM) + batch * MOMENTUM

SHAPES = [
    pytest.param((4, 5, 7, 3), 1, id="nchw"),
    pytest.param((4, 7, 3, 5), 3, id="nhwc"),
    pytest.param((2, 3, 50, 30), 1, id="nchw-large-planes"),
    pytest.param((3, 3, 2, 1030), 3, id="nhwc-many-channels"),
    pytest.param((5000, 3), 1, id="2d-many-rows"),
    pytest.param((130, 2, 3), 1, id="3d-many-samples"),
    pytest.param((3, 4, 5, 2, 3), 2, id="5d-middle-axis"),
    pytest.param((3, 1, 1, 1), 1, id="one-channel"),
]


@dataclass
class Reference:
    """Batch normalization in float64, over every axis but `axis`."""

    x: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray
    axis: int

    def __post_init__(self) -> None:
        self.x, self.gamma, self.beta = (
            array.astype(np.float64) for array in (self.x, self.gamma, self.beta)
        )
        self.reduced = tuple(i for i in range(self.x.ndim) if i != self.axis)
        self.count = self.x.size // self.x.shape[self.axis]
        self.mean = self.x.mean(self.reduced)
        self.variance = self.x.var(self.reduced)

    def along(self, values: np.ndarray) -> np.ndarray:
        return values.reshape([-1 if i == self.axis else 1 for i in range(self.x.ndim)])

    def centered(self) -> np.ndarray:
        return (self.x - self.along(self.mean)) / self.along(np.sqrt(self.variance + EPSILON))

    def y(self) -> np.ndarray:
        return self.centered() * self.along(self.gamma) + self.along(self.beta)

    def gradients(self, dy: np.ndarray) -> list[np.ndarray]:
        dy = dy.astype(np.float64)
        x_hat = self.centered()
        beta_diff = dy.sum(self.reduced)
        gamma_diff = (dy * x_hat).sum(self.reduced)
        scale = self.along(self.gamma / np.sqrt(self.variance + EPSILON))
        means = self.along(beta_diff / self.count) + x_hat * self.along(gamma_diff / self.count)
        return [scale * (dy - means), gamma_diff, beta_diff]


def batch_norm(
    x: flow.Tensor,
    gamma: flow.Tensor,
    beta: flow.Tensor,
    axis: int,
    statistics: tuple[flow.Tensor, flow.Tensor] | None = None,
    training: bool = True,
) -> flow.Tensor:
    mean, variance = statistics or (None, None)
    if x.dtype == flow.bfloat16:
        channels = gamma.shape[0]
        return normalization.batch_norm(
            x,
            flow.zeros(channels) if mean is None else mean,
            flow.ones(channels) if variance is None else variance,
            gamma,
            beta,
            axis=axis,
            epsilon=EPSILON,
            momentum=MOMENTUM,
            is_training=training,
        )
    return flow._C.normalization(x, mean, variance, gamma, beta, axis, EPSILON, MOMENTUM, training)


def batch_norm_add_relu(
    x: flow.Tensor,
    gamma: flow.Tensor,
    beta: flow.Tensor,
    axis: int,
    addend: flow.Tensor | None = None,
    statistics: tuple[flow.Tensor, flow.Tensor] | None = None,
) -> flow.Tensor:
    mean, variance = statistics or (None, None)
    return flow._C.normalization_add_relu(
        x, addend, mean, variance, gamma, beta, axis, EPSILON, MOMENTUM, True
    )


def case(shape: tuple[int, ...], axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (its channels have different means and scales), gamma, beta."""
    channels = shape[axis]
    along = [-1 if i == axis else 1 for i in range(len(shape))]
    x = random(*shape) * (1 + random(channels, seed=1) ** 2).reshape(along)
    x = x + 3 * random(channels, seed=2).reshape(along)
    return x, random(channels, seed=3), random(channels, seed=4)


# In mixed precision the statistics and parameters are float32, and so are their gradients.
FLOATS = ("float32", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_training_output_and_gradients(shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x, gamma, beta = case(shape, axis)
    x, dy = as_held(x, dtype), as_held(random(*shape, seed=5), dtype)
    reference = Reference(x, gamma, beta, axis)

    y, grads = gradients(
        lambda *a: batch_norm(*a, axis=axis), [x, gamma, beta], dy, (dtype, *FLOATS)
    )

    assert_close(y, reference.y(), dtype=dtype)
    for actual, expected, has in zip(grads, reference.gradients(dy), (dtype, *FLOATS), strict=True):
        assert_close(actual, expected, dtype=has, reduced=reference.count)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_bfloat16_is_float32_rounded_once(shape: tuple[int, ...], axis: int) -> None:
    """But for the order in which lanes add up a plane, which may move a rounding."""
    x, gamma, beta = case(shape, axis)
    x, dy = as_held(x, "bfloat16"), as_held(random(*shape, seed=5), "bfloat16")
    results = []
    for dtype in ("bfloat16", "float32"):
        statistics = flow.zeros(shape[axis]), flow.ones(shape[axis])
        y, (dx, *parameters) = gradients(
            lambda *a, kept=statistics: batch_norm(*a, axis=axis, statistics=kept),
            [x, gamma, beta],
            dy,
            (dtype, *FLOATS),
        )
        rounded = [as_held(y, "bfloat16"), as_held(dx, "bfloat16")]
        results.append((rounded, [*parameters, *(kept.numpy() for kept in statistics)]))
    (mine, mine_wide), (wide, wide_too) = results
    for actual, expected in zip(mine, wide, strict=True):
        assert np.mean(actual != expected) < 1e-2
        np.testing.assert_allclose(actual, expected, rtol=2**-7)
    for actual, expected in zip(mine_wide, wide_too, strict=True):
        assert_close(actual, expected, reduced=x.size // shape[axis])


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_running_statistics_take_the_unbiased_variance(shape: tuple[int, ...], axis: int) -> None:
    x, gamma, beta = case(shape, axis)
    reference = Reference(x, gamma, beta, axis)
    mean_before = random(shape[axis], seed=6)
    mean, variance = flow.tensor(mean_before), flow.ones(shape[axis])

    batch_norm(*map(flow.tensor, (x, gamma, beta)), axis=axis, statistics=(mean, variance))

    unbiased = reference.variance * reference.count / (reference.count - 1)
    assert_close(mean.numpy(), mean_before * (1 - MOMENTUM) + reference.mean * MOMENTUM)
    assert_close(variance.numpy(), 1 - MOMENTUM + unbiased * MOMENTUM)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES[:2])
def test_inference_output_and_gradients(shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x, gamma, beta = case(shape, axis)
    x, dy = as_held(x, dtype), as_held(random(*shape, seed=5), dtype)
    mean, variance = random(shape[axis], seed=6), random(shape[axis], seed=7) ** 2
    statistics = (flow.tensor(mean), flow.tensor(variance))

    y, (dx, gamma_diff, beta_diff) = gradients(
        lambda *a: batch_norm(*a, axis=axis, statistics=statistics, training=False),
        [x, gamma, beta],
        dy,
        (dtype, *FLOATS),
    )

    reference = Reference(x, gamma, beta, axis)
    reference.mean, reference.variance = mean.astype(np.float64), variance.astype(np.float64)
    scale = reference.gamma / np.sqrt(reference.variance + EPSILON)
    assert_close(y, reference.y(), dtype=dtype)
    assert_close(dx, dy * reference.along(scale), dtype=dtype)
    _, expected_gamma, expected_beta = reference.gradients(dy)
    assert_close(gamma_diff, expected_gamma, reduced=reference.count)
    assert_close(beta_diff, expected_beta, reduced=reference.count)
    np.testing.assert_array_equal(statistics[0].numpy(), mean)
    np.testing.assert_array_equal(statistics[1].numpy(), variance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_addend", [True, False])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_add_relu_output_and_gradients(
    shape: tuple[int, ...], axis: int, with_addend: bool, dtype: str
) -> None:
    x, gamma, beta = case(shape, axis)
    x, dy = as_held(x, dtype), as_held(random(*shape, seed=5), dtype)
    addends = [as_held(random(*shape, seed=8), dtype)] if with_addend else []
    dtypes = [dtype, *FLOATS, *([dtype] if with_addend else [])]
    reference = Reference(x, gamma, beta, axis)
    total = reference.y() + (addends[0] if with_addend else 0.0)

    y, grads = gradients(
        lambda x, gamma, beta, addend=None: batch_norm_add_relu(x, gamma, beta, axis, addend),
        [x, gamma, beta, *addends],
        dy,
        dtypes,
    )

    assert_close(y, np.maximum(total, 0), dtype=dtype)
    masked = dy * (y > 0)  # the kernel's own signs: values near 0 may round to either side
    expected = [*reference.gradients(masked), *([masked] if with_addend else [])]
    for actual, wanted, has in zip(grads, expected, dtypes, strict=True):
        assert_close(actual, wanted, dtype=has, reduced=reference.count)


def test_add_relu_updates_running_statistics() -> None:
    x, gamma, beta = (flow.tensor(array) for array in case((4, 7, 3, 5), 3))
    fused = (flow.zeros(5), flow.ones(5))
    plain = (flow.zeros(5), flow.ones(5))
    batch_norm_add_relu(x, gamma, beta, 3, statistics=fused)
    batch_norm(x, gamma, beta, 3, statistics=plain)
    for one, other in zip(fused, plain, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize(("shape", "axis"), [((16, 4, 20, 20), 1), ((16, 20, 20, 4), 3)])
def test_mean_large_against_the_standard_deviation(shape: tuple[int, ...], axis: int) -> None:
    x = random(*shape) + np.float32(1000)
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    dy = random(*shape, seed=5)
    reference = Reference(x, gamma, beta, axis)
    variance = flow.zeros(4)

    y, grads = gradients(
        lambda *a: batch_norm(*a, axis=axis, statistics=(flow.zeros(4), variance)),
        [x, gamma, beta],
        dy,
    )

    assert_close(y, reference.y())
    unbiased = reference.variance * reference.count / (reference.count - 1)
    assert_close(variance.numpy(), unbiased * MOMENTUM)
    # The operator hands the mean to the gradient in float32: 6e-5 / 2 off for a mean of 1000.
    rounding = Tolerance(rtol=2e-5, atol=4e-5)
    for actual, expected in zip(grads, reference.gradients(dy), strict=True):
        assert_close(
            actual,
            expected,
            reduced=reference.count,
            override=rounding,
            reason="the saved mean is rounded to float32",
        )


@pytest.mark.parametrize(("shape", "axis"), [((1, 2), 1), ((1, 2, 1, 1), 1), ((1, 1, 1, 2), 3)])
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


@pytest.mark.parametrize(("shape", "axis"), [((0, 3, 4, 4), 1), ((0, 4, 4, 3), 3)])
@pytest.mark.parametrize("training", [True, False])
def test_empty_batch(shape: tuple[int, ...], axis: int, training: bool) -> None:
    statistics = (flow.zeros(3), flow.ones(3))
    ones = np.ones(3, np.float32)
    y, (dx, gamma_diff, beta_diff) = gradients(
        lambda *a: batch_norm(*a, axis=axis, statistics=statistics, training=training),
        [np.zeros(shape, np.float32), ones, ones],
        np.zeros(shape, np.float32),
    )
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(gamma_diff, np.zeros(3))
    np.testing.assert_array_equal(beta_diff, np.zeros(3))
    np.testing.assert_array_equal(statistics[0].numpy(), np.zeros(3))
    np.testing.assert_array_equal(statistics[1].numpy(), np.ones(3))


@pytest.mark.parametrize(("shape", "axis"), SHAPES[:2])
def test_nan_stays_in_its_channel(shape: tuple[int, ...], axis: int) -> None:
    x, gamma, beta = case(shape, axis)
    np.moveaxis(x, axis, 0)[2].flat[5] = np.nan
    y = np.moveaxis(batch_norm(*map(flow.tensor, (x, gamma, beta)), axis=axis).numpy(), axis, 0)
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()


def test_non_contiguous_input_and_gradient() -> None:
    x, gamma, beta = case((4, 7, 3, 5), 3)
    dy = random(4, 5, 7, 3, seed=5)

    def norm(x: flow.Tensor, gamma: flow.Tensor, beta: flow.Tensor) -> flow.Tensor:
        view = x.permute(0, 3, 1, 2)
        assert not view.is_contiguous()
        return batch_norm(view, gamma, beta, axis=1)

    y, (dx, _, _) = gradients(norm, [x, gamma, beta], dy)
    reference = Reference(x, gamma, beta, 3)
    assert_close(y, reference.y().transpose(0, 3, 1, 2))
    expected, _, _ = reference.gradients(dy.transpose(0, 2, 3, 1))
    assert_close(dx, expected, reduced=reference.count)


@pytest.mark.parametrize(("shape", "axis"), SHAPES[:2])
@pytest.mark.parametrize("operator", [batch_norm, batch_norm_add_relu])
def test_eager_equals_graph(shape: tuple[int, ...], axis: int, operator: object) -> None:
    assert_eager_equals_graph(
        lambda *a: operator(*a, axis=axis), list(case(shape, axis)), random(*shape, seed=5)
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("shape", "axis"), SHAPES[:2])
def test_addition_fused_by_the_graph(shape: tuple[int, ...], axis: int, training: bool) -> None:
    """The graph compiler folds `norm(x) + z` into the operator's input `_add_to_output`."""
    x, gamma, beta = case(shape, axis)
    z = random(*shape, seed=8)
    norm = nn.BatchNorm2d(shape[axis], eps=EPSILON)
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

    reference = Reference(x, gamma, beta, axis)
    if not training:
        reference.mean, reference.variance = np.zeros(shape[axis]), np.ones(shape[axis])
    graph = Fused()
    with flow.no_grad():
        y = graph(flow.tensor(x), flow.tensor(z)).numpy()
    operators = [op.user_conf.op_type_name for op in graph._full_graph_proto.net.op]
    assert "normalization" in operators
    assert "add_n" not in operators
    assert_close(y, reference.y() + z)


def test_several_python_threads() -> None:
    x, gamma, beta = map(flow.tensor, case((8, 16, 16, 32), 3))
    assert_same_in_threads(lambda: batch_norm(x, gamma, beta, axis=3).numpy())


def test_forked_process() -> None:
    assert_same_after_fork(
        """
        norm = nn.BatchNorm2d(64)
        x = flow.randn(8, 64, 32, 32, requires_grad=True)
        norm(x).square().sum().backward()
        return x.grad.numpy()
        """.replace("\n        ", "\n")
    )
