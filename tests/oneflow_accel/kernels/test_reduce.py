"""Sums: every set of axes, accuracy, and the same result for any number of threads."""

from __future__ import annotations

import itertools

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin

SHAPES = [(3, 17, 70), (2, 3, 5, 7), (300, 2000), (1, 9000), (9000, 1), (3, 0, 2), (700, 3, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_set_of_axes(shape: tuple[int, ...]) -> None:
    array = random(*shape)
    x = flow.tensor(array)
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            expected = array.astype(np.float64).sum(axis=axes)
            reduced = array.size // max(expected.size, 1)
            assert_close(x.sum(dim=axes).numpy(), expected, reduced=reduced)


def test_ten_million_terms() -> None:
    """Terms of one sign, whose plain running sum in float32 is off by a thousandth."""
    array = np.random.default_rng(0).random(10_000_000, dtype=np.float32)
    expected = array.astype(np.float64).sum()
    assert_close(flow.tensor(array).sum().numpy(), expected)
    columns = flow.tensor(array.reshape(-1, 10)).sum(dim=0).numpy()
    assert_close(columns, array.reshape(-1, 10).astype(np.float64).sum(axis=0))


def test_not_a_number_and_infinity_pass() -> None:
    array = np.array([[1, np.nan, 2], [np.inf, 1, 1], [np.inf, -np.inf, 0]], np.float32)
    np.testing.assert_array_equal(flow.tensor(array).sum(dim=1).numpy(), [np.nan, np.inf, np.nan])
