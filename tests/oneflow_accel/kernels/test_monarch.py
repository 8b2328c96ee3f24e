"""Monarch products beyond records: golden values, the oracle, shapes, errors, memory, threads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType

from oneflow_accel.kernels import monarch, registry
from oneflow_accel.kernels.monarch import monarch_multiply

import numpy as np
import oneflow as flow
import pytest

from tests.launch import REPOSITORY, run_process
from tests.oneflow_accel.kernels import harness
from tests.oneflow_accel.kernels.harness import (
    assert_same_for_any_number_of_threads,
    needs_plugin,
    random,
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str, dtype: str) -> None:
    x, a, b = (flow.tensor(np.array(value, dtype=dtype)) for value in GOLDEN[name][:3])
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


def test_float64_equals_the_oracle(oracle: ModuleType) -> None:
    for g, (k, q, p, blocks, s, r), rows, n in _random_shapes(200):
        a, b = g.standard_normal((k, q, p)), g.standard_normal((blocks, s, r))
        x = g.standard_normal((rows, n))
        padded = np.concatenate([x, np.zeros((rows, k * p - n))], axis=1)
        expected = oracle.apply_two_stage(padded, a, b)
        y = monarch_multiply(*map(flow.tensor, (x, a, b))).numpy()
        assert_close(y, expected, dtype="float64", reduced=p * r)
        np.testing.assert_allclose(
            record.dense(a, b), oracle.dense_entrywise(a, b), rtol=1e-12, atol=1e-12
        )


@needs_plugin
def test_random_shapes_and_their_gradients() -> None:
    for g, (k, q, p, blocks, s, r), rows, n in _random_shapes(200):
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


@needs_plugin
def test_reference_and_kernel_agree() -> None:
    arrays = [random(9, 50), random(4, 6, 13, seed=1), random(3, 11, 8, seed=2), random(31)]
    dy = random(9, 31, seed=3)
    y, grads = harness.gradients(lambda *t: monarch_multiply(*t, out_features=31), arrays, dy)
    expected, expected_grads = harness.gradients(
        lambda *t: monarch._reference(*t, out_features=31), arrays, dy
    )
    assert_close(y, expected, reduced=13 * 8)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, reduced=13 * 8)


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


@needs_plugin
def test_which_implementation_runs() -> None:
    x, a, b = flow.ones(2, 6), flow.ones(2, 3, 3), flow.ones(3, 4, 2)
    double = [tensor.to(flow.float64) for tensor in (x, a, b)]
    for tensors, text in [((x, a, b), "CHOSEN: tiled ("), (double, "CHOSEN: reference")]:
        assert text in registry.explain("monarch_multiply", "cpu", *tensors, out_features=12)


@needs_plugin
def test_result_does_not_depend_on_the_number_of_threads() -> None:
    code = """
import hashlib
import numpy as np
import oneflow_accel, oneflow as flow
from oneflow_accel.kernels.monarch import monarch_multiply
generator = np.random.default_rng(0)
def tensor(*shape):
    return flow.tensor(generator.standard_normal(shape, np.float32), requires_grad=True)
for rows in (3, 530):
    tensors = [tensor(rows, 150), tensor(4, 48, 38), tensor(4, 60, 48), tensor(240)]
    y = monarch_multiply(*tensors)
    y.backward(y.detach())
    everything = b"".join(t.numpy().tobytes() for t in [y, *(t.grad for t in tensors)])
    print("result", rows, hashlib.sha256(everything).hexdigest())
"""
    assert_same_for_any_number_of_threads(code, 2)


@needs_plugin
def test_activations_are_not_copied() -> None:
    """y takes 64 MiB, gradient of x and what is kept for it 32 each; without a gradient nothing."""
    code = """
import resource
import oneflow_accel, oneflow as flow
from oneflow_accel.kernels.monarch import monarch_multiply
rows = 32768
x, dy = flow.randn(rows, 256, requires_grad=True), flow.randn(rows, 512)
a, b = flow.randn(4, 64, 64, requires_grad=True), flow.randn(4, 128, 64, requires_grad=True)
def evaluate():
    with flow.no_grad():
        monarch_multiply(x, a, b)[:1].numpy()
def train():
    y = monarch_multiply(x, a, b)
    y.backward(dy)
    x.grad[:1].numpy()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
monarch_multiply(x[:99], a, b).numpy()
before = peak()
evaluate()
forward = peak()
train()
print("peak", forward - before, peak() - before)
"""
    output = run_process(["-c", code]).stdout
    line = next(line for line in output.splitlines() if line.startswith("peak "))
    forward, both = map(float, line.split()[1:])
    assert forward < 64 + 16, output
    assert both < 128 + 24, output
