"""Attention beside what its records say: entries, errors, dtypes, memory, threads and processes."""

from __future__ import annotations

from oneflow_accel.kernels import attention, plugin, registry
from oneflow_accel.kernels.attention import packed_attention, scaled_dot_product_attention

import numpy as np
import oneflow as flow
import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import (
    assert_eager_equals_graph,
    assert_same_after_fork,
    assert_same_in_threads,
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


@pytest.mark.parametrize("causal", [False, True])
def test_reference_and_kernel_agree(causal: bool) -> None:
    q, dy = random(2, 3, 9, 5), random(2, 3, 9, 5, seed=1)
    k, v = random(2, 3, 14, 5, seed=2), random(2, 3, 14, 5, seed=3)

    def kernel(*qkv: flow.Tensor) -> flow.Tensor:
        return scaled_dot_product_attention(*qkv, causal=causal, scale=0.3)

    def reference(*qkv: flow.Tensor) -> flow.Tensor:
        return attention._composition(*qkv, causal=causal, scale=0.3)

    y, grads = gradients(kernel, [q, k, v], dy)
    expected, expected_grads = gradients(reference, [q, k, v], dy)
    assert_close(y, expected, reduced=14)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, reduced=14)


def test_packed_is_the_same_attention() -> None:
    qkv, dy = random(2, 70, 3, 4, 24), random(2, 70, 96, seed=1)

    def separate(qkv: flow.Tensor) -> flow.Tensor:
        q, k, v = (qkv[:, :, part].permute(0, 2, 1, 3) for part in range(3))
        out = scaled_dot_product_attention(q, k, v, causal=True)
        return out.permute(0, 2, 1, 3).reshape(2, 70, 96)

    y, (dx,) = gradients(lambda x: packed_attention(x, 4, causal=True), [qkv], dy)
    expected, (expected_dx,) = gradients(separate, [qkv], dy)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(dx, expected_dx)


def test_reference_of_global_tensors() -> None:
    placement = flow.placement("cpu", ranks=[0])
    arrays = [random(2, 3, 5, 4, seed=seed) for seed in range(3)]
    local = [flow.tensor(array) for array in arrays]
    whole = [flow.tensor(a, placement=placement, sbp=flow.sbp.broadcast) for a in arrays]
    y = attention._composition(*whole, causal=True, scale=0.5)
    expected = attention._composition(*local, causal=True, scale=0.5)
    np.testing.assert_array_equal(y.to_local().numpy(), expected.numpy())


def test_later_keys_do_not_matter() -> None:
    q, k, v = (random(1, 2, 130, 16, seed=seed) for seed in range(3))
    expected = scaled_dot_product_attention(
        *(flow.tensor(x[:, :, :100]) for x in (q, k, v)), causal=True
    )
    k[:, :, 100:], v[:, :, 100:] = np.inf, 1e30
    y = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)), causal=True)
    assert_close(y.numpy()[:, :, :100], expected.numpy(), reduced=100)


def test_shapes_that_do_not_fit() -> None:
    q, k = flow.ones(2, 3, 5, 4), flow.ones(2, 3, 4, 4)
    for wrong in [(q, k, q), (q, k[:, :2], k[:, :2]), (q[0], k, k), (q, k[:, :, :0], k[:, :, :0])]:
        with pytest.raises(ValueError, match=r"are not \(batch, heads, queries, dim\)"):
            scaled_dot_product_attention(*wrong)
    with pytest.raises(ValueError, match="causal attention of 5 queries needs as many keys, not 4"):
        scaled_dot_product_attention(q, k, k, causal=True)
    for shape, heads in [((2, 5, 12), 3), ((2, 5, 3, 2, 4), 4), ((2, 5), 1), ((2, 0, 12), 1)]:
        with pytest.raises(ValueError, match="qkv of"):
            packed_attention(flow.ones(*shape), heads)


def test_the_operators_check_shapes_too() -> None:
    q, k = flow.ones(2, 3, 5, 4), flow.ones(2, 3, 4, 4)
    settings = {"causal": False, "scale": 1.0}
    with pytest.raises(RuntimeError, match=r"attention needs a query of .* not \(2,3,5,4\)"):
        attention._attention(q, k, q, **settings)
    with pytest.raises(RuntimeError, match="no fewer keys than queries"):
        attention._attention(q, k, k, causal=True, scale=1.0)
    with pytest.raises(RuntimeError, match="of one dtype"):
        attention._attention(q, q, q.to(flow.bfloat16), **settings)
    with pytest.raises(RuntimeError, match="packed attention needs a projection"):
        attention._packed(q, **settings)


def test_which_implementation_runs() -> None:
    x = flow.ones(1, 2, 3, 1, 4)
    half = x.to(flow.bfloat16)
    settings = {"causal": False, "scale": 0.5}
    for tensor, text in [
        (x, "CHOSEN: blocked_packed_attention ("),
        (half, "CHOSEN: blocked_packed_attention_bfloat16 ("),
        (half.clone().requires_grad_(), "has a gradient in float32 only"),
        (x.to(flow.float64), "CHOSEN: reference"),
    ]:
        assert text in registry.explain("packed_attention", "cpu", tensor, **settings)


def test_eager_equals_graph() -> None:
    qkv, dy = random(2, 70, 3, 4, 24), random(2, 70, 96, seed=1)
    assert_eager_equals_graph(lambda x: packed_attention(x, 4, causal=True), [qkv], dy)


def test_several_python_threads() -> None:
    qkv = flow.tensor(random(2, 130, 3, 2, 33))
    assert_same_in_threads(lambda: packed_attention(qkv, 2).numpy())


def test_forked_process() -> None:
    assert_same_after_fork("""
from oneflow_accel.kernels.attention import packed_attention
x = flow.randn(2, 130, 3, 3, 33).requires_grad_()
packed_attention(x, 3, causal=True).sum().backward()
return x.grad.numpy()
""")


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    """One head: its blocks of queries are what threads share."""
    code = """
import hashlib
import numpy as np
import oneflow_accel, oneflow as flow
from oneflow_accel.kernels.attention import packed_attention
x = flow.tensor(np.random.default_rng(0).standard_normal((1, 301, 3, 1, 40), np.float32))
x.requires_grad = True
y = packed_attention(x, 1, causal=True)
y.backward(y)
print("result", hashlib.sha256(y.numpy().tobytes() + x.grad.numpy().tobytes()).hexdigest())
"""
    results = set()
    for threads in ("1", "3"):
        output = run_process(["-c", code], env={plugin.THREADS_VARIABLE: threads}).stdout
        results |= {line for line in output.splitlines() if line.startswith("result ")}
    assert len(results) == 1


def test_no_matrix_of_queries_by_keys_is_kept() -> None:
    """Two of them take 128 MiB; a step allocates less, and leaves nothing behind."""
    code = """
import resource
import oneflow_accel, oneflow as flow
from oneflow_accel.kernels.attention import packed_attention
x = flow.randn(1, 4096, 3, 2, 16).requires_grad_()
def step():
    x.grad = None
    packed_attention(x, 2, causal=True).sum().backward()
    x.grad.numpy()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
step()
first = peak()
for _ in range(4):
    step()
print("peak", first - before, peak() - first)
"""
    output = run_process(["-c", code]).stdout
    line = next(line for line in output.splitlines() if line.startswith("peak "))
    first, later = map(float, line.split()[1:])
    assert first < 48, output
    assert later < 16, output
