"""Copies between layouts: element types, views of views, fills."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)

pytestmark = needs_plugin

DTYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_]


def _in_graph(fn: Callable[[flow.Tensor], flow.Tensor], x: flow.Tensor) -> np.ndarray:
    class Graph(nn.Graph):
        def build(self, x: flow.Tensor) -> flow.Tensor:
            return fn(x)

    return Graph()(x).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 70), (130, 67), (2, 9, 17, 33)])
def test_every_permutation_of_every_type(shape: tuple[int, ...], dtype: type) -> None:
    array = (9 * random(*shape)).astype(dtype)
    x = flow.tensor(array)
    for axes in itertools.permutations(range(len(shape))):
        copy = x.permute(*axes).contiguous()
        np.testing.assert_array_equal(copy.numpy(), array.transpose(axes))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16, np.int8])
def test_types_in_a_graph(dtype: type) -> None:
    array = (9 * random(33, 4, 21)).astype(dtype)
    x = flow.tensor(array)
    np.testing.assert_array_equal(
        _in_graph(lambda x: x.permute(2, 0, 1), x), array.transpose(2, 0, 1)
    )
    np.testing.assert_array_equal(_in_graph(lambda x: x[3:30:2, :, 1:], x), array[3:30:2, :, 1:])
    np.testing.assert_array_equal(
        _in_graph(lambda x: flow.cat([x, x], dim=1), x), np.concatenate([array, array], 1)
    )
    np.testing.assert_array_equal(_in_graph(lambda x: x.chunk(2, dim=1)[1], x), array[:, 2:])


def test_views_of_views() -> None:
    array = random(4, 6, 8, 10)
    x = flow.tensor(array)
    view = x.permute(3, 0, 2, 1)[1:9:3, :, 2:].transpose(0, 1)
    expected = array.transpose(3, 0, 2, 1)[1:9:3, :, 2:].swapaxes(0, 1)
    np.testing.assert_array_equal(view.contiguous().numpy(), expected)
    np.testing.assert_array_equal((view * 1.0).numpy(), expected)


def test_repeated_elements() -> None:
    array = random(3, 1, 5)
    copy = flow.tensor(array).expand(2, 3, 400, 5).contiguous()
    np.testing.assert_array_equal(copy.numpy(), np.broadcast_to(array, (2, 3, 400, 5)))


def test_one_element_of_a_vector() -> None:
    x = flow.tensor(random(7), requires_grad=True)
    (3 * x[4]).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [0, 0, 0, 0, 3, 0, 0])


@pytest.mark.parametrize("dtype", [flow.float32, flow.float64, flow.int64, flow.int32])
@pytest.mark.parametrize("shape", [(1,), (0, 3), (5,), (70001,)])
def test_fills(shape: tuple[int, ...], dtype: flow.dtype) -> None:
    for value, filled in (
        (0, flow.zeros(shape, dtype=dtype)),
        (1, flow.ones(shape, dtype=dtype)),
        (-7, flow.full(shape, -7, dtype=dtype)),
        (0, flow.zeros_like(flow.ones(shape, dtype=dtype))),
    ):
        assert filled.dtype == dtype
        np.testing.assert_array_equal(filled.numpy(), np.full(shape, value))


def test_fill_with_a_fraction() -> None:
    np.testing.assert_array_equal(flow.full((3,), 0.1).numpy(), np.full(3, 0.1, np.float32))
