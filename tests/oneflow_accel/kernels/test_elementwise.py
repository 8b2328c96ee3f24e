"""Elementwise operators beyond records: in place, special values, stock types, order of sums."""

from __future__ import annotations

from oneflow_accel.kernels.operators import Operator

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    as_array,
    as_held,
    assert_same_in_threads,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


@pytest.mark.parametrize("other", [(40, 1009), (1009,), (40, 1), (1,), ()])
@pytest.mark.parametrize("operation", ["add_", "sub_", "mul_", "div_"])
def test_in_place(operation: str, other: tuple[int, ...]) -> None:
    x, y = random(40, 1009), 1.0 + random(*other, seed=1) ** 2
    tensor = flow.tensor(x)
    getattr(tensor, operation)(flow.tensor(y))
    expected = {"add_": x + y, "sub_": x - y, "mul_": x * y, "div_": x / y}[operation]
    assert_close(tensor.numpy(), expected.astype(np.float64))


def test_division_in_place_by_an_element_of_itself() -> None:
    x = 1.0 + random(100003) ** 2
    tensor = flow.tensor(x)
    tensor.div_(tensor[0])
    assert_close(tensor.numpy(), x.astype(np.float64) / x[0])


def test_both_operands_are_the_output() -> None:
    x = random(3, 5000)
    tensor = flow.tensor(x)
    tensor.mul_(tensor)
    assert_close(tensor.numpy(), x.astype(np.float64) ** 2)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: x.add_(1.5), lambda x: x + 1.5),
        (lambda x: x.sub_(2), lambda x: x - 2),
        (lambda x: x.mul_(0.25), lambda x: x * 0.25),
        (lambda x: x.div_(4), lambda x: x / 4),
    ],
)
def test_number_in_place(operation: object, expected: object) -> None:
    x = random(50021)
    tensor = flow.tensor(x)
    operation(tensor)
    assert_close(tensor.numpy(), expected(x.astype(np.float64)))


def test_bias_add_in_place_of_a_graph() -> None:
    """In an nn.Graph bias_add may write over its input."""

    class Graph(flow.nn.Graph):
        def build(self, x: flow.Tensor, b: flow.Tensor) -> flow.Tensor:
            return flow._C.bias_add(x * 2.0, b, axis=1)

    x, b = random(64, 1009), random(1009, seed=1)
    y = Graph()(flow.tensor(x), flow.tensor(b)).numpy()
    assert_close(y, 2.0 * x.astype(np.float64) + b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_with_a_tensor_of_one_element(name: str, dtype: str) -> None:
    operator = Operator(f"scalar_{name}_by_tensor", ("x", "scalar"), ("y",))
    x, y = as_held(random(40, 1009), dtype), as_held(np.array([1.7], dtype=np.float32), dtype)
    (found,) = operator(*(flow.tensor(a).to(getattr(flow, dtype)) for a in (x, y)))
    formulas = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    expected = formulas[name](x.astype(np.float64), y.astype(np.float64))
    assert_close(as_array(found), expected, dtype=dtype)


def test_a_tensor_of_one_element_from_a_graph_pass() -> None:
    """Gradient clipping in an nn.Graph scales by scalar_mul_by_tensor."""
    parameter = flow.nn.Parameter(flow.ones(40, 1009))
    optimizer = flow.optim.SGD(
        [{"params": [parameter], "lr": 1.0, "clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}]
    )

    class Module(flow.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameter = parameter

        def forward(self) -> flow.Tensor:
            return (self.parameter * 3.0).sum()

    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = Module()
            self.add_optimizer(optimizer)

        def build(self) -> flow.Tensor:
            y = self.module()
            y.backward()
            return y

    Step()()
    expected = np.full((40, 1009), 1.0 - 1.0 / np.sqrt(40 * 1009))
    assert_close(parameter.numpy(), expected)


@pytest.mark.parametrize("columns", [1, 3, 4097])
@pytest.mark.parametrize("rows", [1, 97])
def test_gradient_of_a_divisor_does_not_depend_on_the_threads(rows: int, columns: int) -> None:
    """Its sums are made in parts that the shape alone decides: the same again and again."""
    x, dz = flow.tensor(random(rows, columns)), flow.tensor(random(rows, columns, seed=2))

    def gradient() -> np.ndarray:
        y = flow.full((1, columns), 2.0, requires_grad=True)
        (x / y).backward(dz)
        return y.grad.numpy()

    assert_same_in_threads(gradient, threads=3, calls=3)
    expected = -(dz.numpy().astype(np.float64) * x.numpy() / 4).sum(axis=0, keepdims=True)
    assert_close(gradient(), expected, reduced=rows)


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


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_other_dtypes_stay_with_the_stock_kernels(dtype: type) -> None:
    a, b = np.arange(12, dtype=dtype).reshape(3, 4), np.arange(1, 5, dtype=dtype)
    x, y = flow.tensor(a), flow.tensor(b)
    np.testing.assert_array_equal((x + y).numpy(), a + b)
    np.testing.assert_array_equal((x * y).numpy(), a * b)
    np.testing.assert_array_equal((x - 3).numpy(), a - 3)
    np.testing.assert_allclose((x / y).numpy(), a / b, rtol=1e-6)


def test_mixed_dtypes_are_promoted() -> None:
    a, b = random(3, 4), np.arange(1, 5)
    np.testing.assert_allclose((flow.tensor(a) * flow.tensor(b)).numpy(), a * b, rtol=1e-6)


def test_power_of_zero() -> None:
    x = flow.tensor([0.0, -2.0, 3.0], requires_grad=True)
    y = x**0
    y.sum().backward()
    np.testing.assert_array_equal(y.numpy(), [1, 1, 1])
    np.testing.assert_array_equal(x.grad.numpy(), [0, 0, 0])
