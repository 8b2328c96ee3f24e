"""Look-ups: element types, segments that are left out, order of addition."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)

pytestmark = needs_plugin


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32, np.int8, np.float16])
def test_element_types(dtype: type) -> None:
    table = (9 * random(50, 3, 4)).astype(dtype)
    indices = np.random.default_rng(0).integers(0, 50, (7, 2))
    rows = flow._C.gather(flow.tensor(table), flow.tensor(indices), axis=0)
    np.testing.assert_array_equal(rows.numpy(), table[indices])


def test_segment_sum_leaves_other_rows_at_zero() -> None:
    data = flow.tensor(np.ones((4, 3), np.float32))
    segments = flow.tensor(np.array([5, 1, 5, 9]))
    out = flow._C.unsorted_segment_sum(data, segments, axis=0, num_segments=7).numpy()
    expected = np.zeros((7, 3))
    expected[1], expected[5] = 1, 2
    # Segment 9 is beyond the output: OneFlow leaves such rows out.
    np.testing.assert_array_equal(out, expected)


def _gradient() -> np.ndarray:
    table = flow.tensor(random(200, 300), requires_grad=True)
    indices = flow.tensor(np.random.default_rng(1).integers(0, 200, 5000))
    flow._C.gather(table, indices, axis=0).backward(flow.tensor(random(5000, 300, seed=2)))
    return table.grad.numpy()


def test_gradient_adds_in_the_order_of_the_indices() -> None:
    indices = np.random.default_rng(1).integers(0, 200, 5000)
    expected = np.zeros((200, 300), np.float32)
    np.add.at(expected, indices, random(5000, 300, seed=2))
    np.testing.assert_array_equal(_gradient(), expected)
