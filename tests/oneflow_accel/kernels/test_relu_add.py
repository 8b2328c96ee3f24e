"""relu and the addition of equal shapes: values, gradients and in-place forms."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import (
    assert_eager_equals_graph,
    assert_same_after_fork,
    assert_same_in_threads,
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin

# Below, at and above what one thread and one SIMD register take.
SHAPES = [(), (1,), (0, 3), (7, 5), (2, 3, 5, 7), (3, 70001)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_relu_output_and_gradient(shape: tuple[int, ...], inplace: bool) -> None:
    x, dy = random(*shape), random(*shape, seed=1)
    # A leaf that needs a gradient cannot be changed in place.
    y, (dx,) = gradients(lambda x: nn.ReLU(inplace=inplace)(x * 1.0), [x], dy)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(dx, np.where(x > 0, dy, 0))


def test_relu_in_place_writes_to_its_input() -> None:
    x = random(5, 7)
    tensor = flow.tensor(x)
    nn.functional.relu(tensor, inplace=True)
    np.testing.assert_array_equal(tensor.numpy(), np.maximum(x, 0))


def test_relu_at_special_values() -> None:
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40] * 9, np.float32)
    y, (dx,) = gradients(flow.relu, [x], np.ones_like(x))
    np.testing.assert_array_equal(y, np.array([0, 0, np.nan, np.inf, 0, 1e-40, 0] * 9, np.float32))
    np.testing.assert_array_equal(dx, np.array([0, 0, 1, 1, 0, 1, 0] * 9, np.float32))


def test_relu_of_a_view() -> None:
    x, dy = random(6, 40, 50), random(50, 6, 40, seed=1)
    y, (dx,) = gradients(lambda x: flow.relu(x.permute(2, 0, 1)), [x], dy)
    np.testing.assert_array_equal(y, np.maximum(x, 0).transpose(2, 0, 1))
    np.testing.assert_array_equal(dx, np.where(x > 0, dy.transpose(1, 2, 0), 0))


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_of_two(shape: tuple[int, ...]) -> None:
    a, b, dy = (random(*shape, seed=seed) for seed in range(3))
    y, (da, db) = gradients(lambda a, b: a + b, [a, b], dy)
    np.testing.assert_array_equal(y, a + b)
    np.testing.assert_array_equal(da, dy)
    np.testing.assert_array_equal(db, dy)


@pytest.mark.parametrize("shape", SHAPES)
def test_residual_in_place(shape: tuple[int, ...]) -> None:
    """`out += identity`, where identity is used twice, so that its gradients are added up."""
    x, dy = random(*shape), random(*shape, seed=1)

    def block(x: flow.Tensor) -> flow.Tensor:
        out = x * 3.0
        out += x
        return out

    y, (dx,) = gradients(block, [x], dy)
    assert_close(y, 4 * x.astype(np.float64))
    assert_close(dx, 4 * dy.astype(np.float64))


@pytest.mark.parametrize("terms", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_of_many(shape: tuple[int, ...], terms: int) -> None:
    arrays = [random(*shape, seed=seed) for seed in range(terms)]
    y = flow._C.add([flow.tensor(array) for array in arrays], inplace=False)
    assert_close(y.numpy(), np.sum(np.asarray(arrays, np.float64), axis=0), reduced=terms)


def test_sum_in_place_with_itself_among_the_terms() -> None:
    a, b = random(3, 5000), random(3, 5000, seed=1)
    x = flow.tensor(a)
    flow._C.add([x, flow.tensor(b), x, x], inplace=True)
    assert_close(x.numpy(), 3.0 * a + b, reduced=4)


def test_sum_of_views() -> None:
    a, b = random(40, 50), random(50, 40, seed=1)
    y = flow.tensor(a).t() + flow.tensor(b)
    np.testing.assert_array_equal(y.numpy(), a.T + b)


def test_broadcast_sum_is_untouched() -> None:
    a, b = random(4, 5), random(5, seed=1)
    np.testing.assert_array_equal((flow.tensor(a) + flow.tensor(b)).numpy(), a + b)


def test_other_dtypes_are_untouched() -> None:
    a = np.arange(-4, 4)
    for dtype in (np.int64, np.float64):
        x = flow.tensor(a.astype(dtype))
        np.testing.assert_array_equal((x + x).numpy(), 2 * a)
    np.testing.assert_array_equal(flow.relu(flow.tensor(a.astype(np.float64))).numpy(), a.clip(0))


def test_eager_equals_graph() -> None:
    def block(x: flow.Tensor, z: flow.Tensor) -> flow.Tensor:
        out = nn.functional.relu(x + z, inplace=True)
        out = out + x
        return flow.relu(out + z + x)

    # Whole numbers: the graph compiler merges additions and so changes their order.
    x, z, dy = (np.round(9 * random(3, 5, 7, seed=seed)) for seed in range(3))
    assert_eager_equals_graph(block, [x, z], dy)


def test_several_python_threads() -> None:
    x, z = flow.tensor(random(300, 500)), flow.tensor(random(300, 500, seed=1))
    assert_same_in_threads(lambda: flow.relu(x + z).numpy())


def test_forked_process() -> None:
    assert_same_after_fork("x = flow.randn(300, 500)\nreturn flow.relu(x + x).numpy()")
