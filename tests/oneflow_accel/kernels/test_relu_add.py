"""relu and equal shapes' addition beyond records: in place, special values, a block."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import (
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin

# Below, at and above what one thread and one SIMD register take.
SHAPES = [(), (0, 3), (7, 5), (3, 70001)]


@pytest.mark.parametrize("shape", SHAPES)
def test_relu_in_place_has_the_same_gradient(shape: tuple[int, ...]) -> None:
    x, dy = random(*shape), random(*shape, seed=1)
    # A leaf that needs a gradient cannot be changed in place.
    y, (dx,) = gradients(lambda x: nn.ReLU(inplace=True)(x * 1.0), [x], dy)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(dx, np.where(x > 0, dy, 0))


def test_relu_at_special_values() -> None:
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40] * 9, np.float32)
    y, (dx,) = gradients(flow.relu, [x], np.ones_like(x))
    np.testing.assert_array_equal(y, np.array([0, 0, np.nan, np.inf, 0, 1e-40, 0] * 9, np.float32))
    np.testing.assert_array_equal(dx, np.array([0, 0, 1, 1, 0, 1, 0] * 9, np.float32))


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


def test_sum_in_place_with_itself_among_the_terms() -> None:
    a, b = random(3, 5000), random(3, 5000, seed=1)
    x = flow.tensor(a)
    flow._C.add([x, flow.tensor(b), x, x], inplace=True)
    assert_close(x.numpy(), 3.0 * a + b, reduced=4)
