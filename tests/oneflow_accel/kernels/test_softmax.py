"""softmax and log_softmax beyond their records: masks, infinities, NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)

pytestmark = needs_plugin

# Rows that are padded to whole vectors, and rows that are too long for it.
LENGTHS = [5, 16, 197, 2048, 2049, 6000]
BOTH = [lambda x: flow.softmax(x, -1), lambda x: flow.log_softmax(x, -1)]


@pytest.mark.parametrize("n", LENGTHS)
def test_masked_elements_are_exactly_zero(n: int) -> None:
    x = random(4, n)
    x[:, 1::2] = -np.inf
    y = flow.softmax(flow.tensor(x), -1).numpy()
    assert (y[:, 1::2] == 0.0).all()
    alone = flow.softmax(flow.tensor(np.ascontiguousarray(x[:, ::2])), -1).numpy()
    np.testing.assert_allclose(y[:, ::2], alone, rtol=1e-5)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("softmax", BOTH)
def test_a_fully_masked_row_is_nan_and_leaves_the_others(softmax: Callable, n: int) -> None:
    x = random(3, n)
    clean = softmax(flow.tensor(x)).numpy()
    x[1] = -np.inf
    y = softmax(flow.tensor(x)).numpy()
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])
