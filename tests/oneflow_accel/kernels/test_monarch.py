"""Monarch products beyond records: golden values, the oracle, shapes, errors, memory, threads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType

from oneflow_accel.kernels import monarch
from oneflow_accel.kernels.monarch import monarch_multiply

import numpy as np
import oneflow as flow
import pytest

from tests.launch import REPOSITORY
from tests.oneflow_accel.kernels import harness
from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
)
from tests.oneflow_accel.kernels.records import monarch as record
from tests.tolerances import assert_close

ORACLE = REPOSITORY.parent / "shared" / "docs" / "oracles" / "monarch_check.py"


def _counted(*shape: int) -> np.ndarray:
    """1, 2, 3..."""
    return 1.0 + np.arange(np.prod(shape)).reshape(shape)


# x, blkdiag1, blkdiag2, y: worked out by hand from the formula, and equal to what the layers of
# HazyResearch/fly give.
GOLDEN = {
    "square": (
        [1, 2, 3, 4],
        [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        [[[1, 0], [2, 1]], [[1, 1], [0, 3]]],
        [5, 64, 49, 159],
    ),
    "three blocks": (
        [1, -1, 2, 1],
        _counted(2, 3, 2),
        [[[1, 2]], [[3, -1]], [[0, 1]]],
        [43, -31, 34],
    ),
    "3 to 5": ([1, 2, 3], _counted(2, 2, 2), _counted(2, 3, 2), [35, 245, 75, 309, 115]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str) -> None:
    x, a, b = (flow.tensor(np.array(value, dtype=np.float32)) for value in GOLDEN[name][:3])
    expected = np.array(GOLDEN[name][3])
    for rows in (x, x.reshape(1, -1), flow.stack([x] * 17).reshape(17, 1, -1)):
        y = monarch_multiply(rows, a, b, out_features=len(expected))
        assert y.shape == (*rows.shape[:-1], len(expected))
        np.testing.assert_array_equal(y.numpy(), np.broadcast_to(expected, y.shape))


def _random_shapes(count: int) -> Iterator[tuple[np.random.Generator, tuple[int, ...], int, int]]:
    """(generator, (k, q, p, l, s, r), rows, length of a row of x): odd, indivisible, one row, more
    rows than a tile; every third one with short rows."""
    for seed in range(count):
        g = np.random.default_rng([5, seed])
        middle = int(g.choice([1, 6, 12, 30, 36, 60, 64, 96, 132]))
        divisors = [d for d in range(1, middle + 1) if middle % d == 0]
        k, blocks = int(g.choice(divisors)), int(g.choice(divisors))
        p, s = int(g.integers(1, 40)), int(g.integers(1, 40))
        rows = int(g.choice([1, 2, 7, 8, 9, 16, 33, 130]))
        n = k * p if seed % 3 else int(g.integers(1, k * p + 1))
        yield g, (k, middle // k, p, blocks, s, middle // blocks), rows, n


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    if not ORACLE.exists():
        pytest.skip("no shared data")
    spec = importlib.util.spec_from_file_location("monarch_check", ORACLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_plugin
def test_random_shapes_and_their_gradients() -> None:
    for g, (k, q, p, blocks, s, r), rows, n in _random_shapes(60):
        m = int(g.integers(1, blocks * s + 1))
        shapes = ((rows, n), (k, q, p), (blocks, s, r), (m,), (rows, m))
        x, a, b, bias, dy = (g.standard_normal(shape).astype(np.float32) for shape in shapes)
        y, grads = harness.gradients(
            lambda *inputs, m=m: monarch_multiply(*inputs, out_features=m), [x, a, b, bias], dy
        )
        wide = [array.astype(np.float64) for array in (dy, x, a, b)]
        expected = wide[1] @ record.dense(wide[2], wide[3])[:m, :n].T + bias
        assert_close(y, expected, reduced=p * r)
        by_hand = (*record.gradients(*wide, m), wide[0].sum(axis=0))
        for grad, expected_grad in zip(grads, by_hand, strict=True):
            assert_close(grad, expected_grad, reduced=max(p, s, rows) * r)
        with flow.no_grad():
            alone = monarch_multiply(*map(flow.tensor, (x, a, b, bias)), out_features=m)
        np.testing.assert_array_equal(alone.numpy(), y)


def test_shapes_that_do_not_fit() -> None:
    x, a, b = flow.ones(2, 6), flow.ones(2, 3, 3), flow.ones(3, 4, 2)
    for wrong, text in [
        ((x, a[0], b), r"are not \(k, q, p\) and \(l, s, r\)"),
        ((x, a, flow.ones(0, 4, 2)), r"are not \(k, q, p\) and \(l, s, r\)"),
        ((x, a, flow.ones(2, 4, 2)), r"gives 2 x 3 values and blkdiag2 \(2, 4, 2\) takes 2 x 2"),
        ((flow.ones(2, 7), a, b), r"rows of x \(2, 7\) are not 1 to 6 long"),
        ((flow.ones(2, 0), a, b), r"rows of x \(2, 0\) are not 1 to 6 long"),
        ((flow.tensor(1.0), a, b), r"rows of x \(\) are not 1 to 6 long"),
        ((x, a, b, flow.ones(11)), r"bias \(11,\) is not \(12,\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            monarch_multiply(*wrong)
    for width in (0, 13):
        with pytest.raises(ValueError, match=f"out_features {width} is not 1 to 12"):
            monarch_multiply(x, a, b, out_features=width)


@needs_plugin
def test_the_operators_check_shapes_too() -> None:
    x, a, b = flow.ones(2, 6), flow.ones(2, 3, 3), flow.ones(3, 4, 2)
    with pytest.raises(RuntimeError, match="a Monarch product needs factors"):
        monarch._forward(x, a, flow.ones(2, 4, 2), None, out_features=8)
    with pytest.raises(RuntimeError, match="at most l s results"):
        monarch._forward(x, a, b, None, out_features=13)
    with pytest.raises(RuntimeError, match="needs as long a bias"):
        monarch._forward(x, a, b, flow.ones(11), out_features=12)
    with pytest.raises(RuntimeError, match="of one dtype"):
        monarch._forward(x, a.to(flow.float64), b, None, out_features=12)
    with pytest.raises(RuntimeError, match="needs as many rows"):
        monarch._backward(flow.ones(3, 12), x, a, b, flow.ones(2, 6))
