"""Elementwise operators beyond records: special values, conversions, a term that is the output."""

from __future__ import annotations

from oneflow_accel.kernels.operators import Operator

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    as_array,
    as_held,
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_with_a_tensor_of_one_element(name: str, dtype: str) -> None:
    operator = Operator(f"scalar_{name}_by_tensor", ("x", "scalar"), ("y",))
    x, y = as_held(random(40, 1009), dtype), as_held(np.array([1.7], dtype=np.float32), dtype)
    (found,) = operator(*(flow.tensor(a).to(getattr(flow, dtype)) for a in (x, y)))
    formulas = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    expected = formulas[name](x.astype(np.float64), y.astype(np.float64))
    assert_close(as_array(found), expected, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_conversion_of_float32_and_float64(dtype: type) -> None:
    x = np.array([0.0, -0.0, 1 / 3, 1e300, -1e300, 1e-300, np.inf, np.nan] * 9, dtype=np.float64)
    to = flow.float32 if dtype is np.float32 else flow.float64
    with np.errstate(over="ignore"):
        source = x if dtype is np.float32 else x.astype(np.float32)
        expected = source.astype(dtype)
    result = flow.tensor(source).to(to)
    assert result.dtype == to
    np.testing.assert_array_equal(result.numpy(), expected)


def test_conversion_to_bfloat16_rounds_to_nearest_even() -> None:
    # 1 + 2^-8 lies halfway between two bfloat16 values; the even one is 1.
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1.0, 3e38, np.inf] * 9, np.float32)
    result = flow.tensor(x).to(flow.bfloat16).to(flow.float32).numpy()
    largest = 2.0**127 * (2 - 2**-7)
    expected = [1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 3.00405527e38, np.inf]
    np.testing.assert_allclose(result, np.array(expected * 9), rtol=1e-6)
    assert result[4] < largest
    assert np.isnan(flow.tensor([np.nan]).to(flow.bfloat16).to(flow.float32).numpy()).all()


def test_power_of_zero() -> None:
    x = flow.tensor([0.0, -2.0, 3.0], requires_grad=True)
    y = x**0
    y.sum().backward()
    np.testing.assert_array_equal(y.numpy(), [1, 1, 1])
    np.testing.assert_array_equal(x.grad.numpy(), [0, 0, 0])


def test_relu_at_special_values() -> None:
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40] * 9, np.float32)
    y, (dx,) = gradients(flow.relu, [x], np.ones_like(x))
    np.testing.assert_array_equal(y, np.array([0, 0, np.nan, np.inf, 0, 1e-40, 0] * 9, np.float32))
    np.testing.assert_array_equal(dx, np.array([0, 0, 1, 1, 0, 1, 0] * 9, np.float32))


def test_sum_in_place_with_itself_among_the_terms() -> None:
    a, b = random(3, 5000), random(3, 5000, seed=1)
    x = flow.tensor(a)
    flow._C.add([x, flow.tensor(b), x, x], inplace=True)
    assert_close(x.numpy(), 3.0 * a + b, reduced=4)
