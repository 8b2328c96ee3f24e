"""Copies between layouts: element types, views of views, fills."""

from __future__ import annotations

import itertools

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)

pytestmark = needs_plugin

DTYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 70), (130, 67), (2, 9, 17, 33)])
def test_every_permutation_of_every_type(shape: tuple[int, ...], dtype: type) -> None:
    array = (9 * random(*shape)).astype(dtype)
    x = flow.tensor(array)
    for axes in itertools.permutations(range(len(shape))):
        copy = x.permute(*axes).contiguous()
        np.testing.assert_array_equal(copy.numpy(), array.transpose(axes))


def test_views_of_views() -> None:
    array = random(4, 6, 8, 10)
    x = flow.tensor(array)
    view = x.permute(3, 0, 2, 1)[1:9:3, :, 2:].transpose(0, 1)
    expected = array.transpose(3, 0, 2, 1)[1:9:3, :, 2:].swapaxes(0, 1)
    np.testing.assert_array_equal(view.contiguous().numpy(), expected)
    np.testing.assert_array_equal((view * 1.0).numpy(), expected)


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
