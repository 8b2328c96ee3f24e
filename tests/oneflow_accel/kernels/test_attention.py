"""Attention beside what its records say: entries, errors, dtypes, memory, threads and processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from oneflow_accel.errors import UserError
from oneflow_accel.kernels import attention, plugin
from oneflow_accel.kernels.attention import (
    draw_seed,
    packed_attention,
    scaled_dot_product_attention,
)
from oneflow_accel.kernels.weight_dropout import kept_weights, philox

import numpy as np
import oneflow as flow
import pytest

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels.harness import (
    as_array,
    emulated_tiles,
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


@pytest.mark.parametrize(("queries", "keys", "dim"), [(50, 50, 64), (130, 300, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_whole_blocks(queries: int, keys: int, dim: int, causal: bool) -> None:
    q, dy = random(1, 2, queries, dim), random(1, 2, queries, dim, seed=1)
    k, v = random(1, 2, keys, dim, seed=2), random(1, 2, keys, dim, seed=3)

    def run(*qkv: flow.Tensor) -> flow.Tensor:
        return scaled_dot_product_attention(*qkv, causal=causal)

    kinds = ["bfloat16"] * 3
    y, grads = gradients(run, [q, k, v], dy, kinds)
    with emulated_tiles():
        by_tiles, grads_by_tiles = gradients(run, [q, k, v], dy, kinds)
    for one, other in zip((by_tiles, *grads_by_tiles), (y, *grads), strict=True):
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max(), rtol=0)
    # Weights are rounded, unless the processor multiplies bfloat16 and did so both times.
    assert plugin.state().level in ("avx512_bf16", "amx") or (by_tiles != y).any()


def _seed(seed: int) -> flow.Tensor:
    return flow.tensor([seed], dtype=flow.int64)


def test_reference_and_kernel_agree_where_heads_share_keys() -> None:
    q, dy = random(2, 6, 9, 5), random(2, 6, 9, 5, seed=1)
    k, v = random(2, 2, 140, 5, seed=2), random(2, 2, 140, 5, seed=3)
    settings = {"causal": True, "scale": 0.3, "dropout": 0.3, "seed": _seed(-(2**60))}
    y, grads = gradients(lambda *x: scaled_dot_product_attention(*x, **settings), [q, k, v], dy)
    expected, expected_grads = gradients(
        lambda *x: attention._composition(*x, **settings), [q, k, v], dy
    )
    assert_close(y, expected, reduced=140)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, reduced=140)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_words(
    counter: list[int], key: tuple[int, int], words: list[int]
) -> None:
    """The known answers of Random123, by Salmon et al."""
    found = philox([np.array(word, np.uint64) for word in counter], key)
    assert [int(word) for word in found] == words


def test_weights_are_kept_at_the_rate_and_independently() -> None:
    dropout = 0.1
    kept = kept_weights(3, (2, 4, 96, 200), dropout)
    other = kept_weights(4, kept.shape, dropout)
    deviation = np.sqrt(dropout * (1 - dropout) / kept.size)
    assert abs(kept.mean() - (1 - dropout)) < 4 * deviation
    for axis in range(4):
        a, b = np.moveaxis(kept, axis, 0)[1:], np.moveaxis(kept, axis, 0)[:-1]
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)
    assert abs(np.corrcoef(kept.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(kept.size)


def test_wrong_dropout() -> None:
    x, qkv, seed = flow.ones(1, 1, 2, 4), flow.ones(1, 2, 12), _seed(1)
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"not in \[0, 1\)"):
            scaled_dot_product_attention(x, x, x, dropout=rate, seed=seed)
    for wrong in (None, seed.to(flow.int32), flow.zeros(2, dtype=flow.int64)):
        with pytest.raises(ValueError, match="needs a seed of shape"):
            packed_attention(qkv, 1, dropout=0.5, seed=wrong)
    for dropout, wrong, text in [
        (1.0, seed, "at a rate of at least 0"),
        (0.5, flow.zeros(2, dtype=flow.int64), "by a seed of one element"),
        (0.5, seed.to(flow.int32), "must be int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            attention._attention(x, x, x, wrong, None, causal=False, scale=1.0, dropout=dropout)


def test_wrong_segments() -> None:
    x, short = flow.ones(2, 1, 3, 4), flow.ones(2, 1, 2, 4)
    good = flow.zeros(2, 3, dtype=flow.int64)
    for wrong in (good[:, :2], good[:1], good.reshape(-1)):
        with pytest.raises(ValueError, match=r"are not \(batch, time\) = \(2, 3\)"):
            scaled_dot_product_attention(x, x, x, segments=wrong)
    with pytest.raises(ValueError, match="as many keys as queries, of which there are 3 and 2"):
        scaled_dot_product_attention(short, x, x, segments=good[:, :2])
    with pytest.raises(ValueError, match=r"segments are of oneflow.int32, not of int64"):
        packed_attention(flow.ones(2, 3, 12), 1, segments=good.to(flow.int32))
    falling = flow.tensor([[0, 0, 1], [2, 2, 1]], dtype=flow.int64)
    with pytest.raises(RuntimeError, match="row 1 has 1 after 2"):
        scaled_dot_product_attention(x, x, x, segments=falling).numpy()


def test_the_reference_with_dropout_does_not_run_in_a_graph() -> None:
    class Graph(flow.nn.Graph):
        def build(self, x: flow.Tensor, seed: flow.Tensor) -> flow.Tensor:
            return packed_attention(x, 1, dropout=0.5, seed=seed)

    with pytest.raises(UserError, match=r"cannot run in an nn\.Graph"):
        Graph()(flow.ones(1, 2, 12, dtype=flow.float64), _seed(1))


class _Layers(flow.nn.Graph):
    """The seeds that three layers draw."""

    def build(self, x: flow.Tensor) -> list[flow.Tensor]:
        return [draw_seed(x) + 0 * x.sum().to(flow.int64) for _ in range(3)]


def _seeds(graph: bool) -> list[int]:
    x = flow.ones(2)
    layers = _Layers() if graph else lambda x: [draw_seed(x) for _ in range(3)]
    return [seed.item() for _ in range(2) for seed in layers(x)]


@pytest.mark.parametrize("graph", [False, True])
def test_seeds_follow_manual_seed_and_differ_by_step_and_layer(graph: bool) -> None:
    found = []
    for number in (1, 1, 2):
        flow.manual_seed(number)
        found.append(_seeds(graph))
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 12
    seed = draw_seed(flow.ones(2))
    assert seed.dtype == flow.int64
    assert tuple(seed.shape) == (1,)


def test_processes_get_one_seed(tmp_path: Path) -> None:
    """Whatever each has drawn before."""
    script = tmp_path / "seeds.py"
    script.write_text("""
import os
import oneflow_accel, oneflow as flow
from oneflow_accel.kernels.attention import draw_seed
rank = flow.env.get_rank()
for _ in range(rank):
    flow.rand(1)
x = flow.ones(2, placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.broadcast)
class Graph(flow.nn.Graph):
    def build(self, x):
        return draw_seed(x)
seeds = [one.to_local().item() for one in (draw_seed(x), Graph()(x))]
print(f"seeds {seeds}\\n", end="", flush=True)
flow.comm.barrier()
# OneFlow may abort while it takes a graph of several processes down.
os._exit(0)
""")
    output = run_distributed([script], 2).stdout
    lines = [line for line in output.splitlines() if line.startswith("seeds ")]
    assert len(lines) == 2, output
    assert lines[0] == lines[1]


def test_new_seeds_build_no_new_operators() -> None:
    x = flow.ones(1, 4, 1, 2, 8)[:, :, [0, 0, 0]].requires_grad_()
    for _ in range(3):
        packed_attention(x, 2, dropout=0.25, seed=draw_seed(x)).sum().backward()
    for each in (attention._packed, attention._packed_grad):
        rates = [key[1][2] for key in each._expressions]
        assert rates.count(0.25) == 1


@pytest.mark.parametrize("queries", [2, 130])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_values_that_are_not_finite_do_not_matter(
    dtype: str, tiles: bool, queries: int
) -> None:
    """Weights of 0 times NaN would be NaN: in blocks of queries, and as deep as a product goes."""
    q = random(1, 2, queries, 16)
    k, v = random(1, 2, 130, 16, seed=1), random(1, 2, 130, 16, seed=2)
    spoilt = v.copy()
    first = 50 if queries == 130 else 129
    spoilt[:, :, first] = np.nan, np.inf, *[np.nan] * 14

    def run(*arrays: np.ndarray) -> np.ndarray:
        tensors = (flow.tensor(x).to(getattr(flow, dtype)) for x in arrays)
        return as_array(scaled_dot_product_attention(*tensors, causal=True))

    expected = run(q, k, v)
    with emulated_tiles() if tiles else nullcontext():
        y = run(q, k, spoilt)
    see_it = np.arange(queries) + 130 - queries >= first
    assert not np.isfinite(y[:, :, see_it]).any()
    assert_close(y[:, :, ~see_it], expected[:, :, ~see_it], dtype=dtype, reduced=130)


def test_shapes_that_do_not_fit() -> None:
    q, k = flow.ones(2, 3, 5, 4), flow.ones(2, 3, 4, 4)
    for wrong in [
        (q, k, q),
        (q, k[:, :2], k[:, :2]),
        (q, k[:, :0], k[:, :0]),
        (q[0], k, k),
        (q, k[:, :, :0], k[:, :, :0]),
    ]:
        with pytest.raises(ValueError, match=r"are not \(batch, heads, queries, dim\)"):
            scaled_dot_product_attention(*wrong)
    with pytest.raises(ValueError, match="causal attention of 5 queries needs as many keys, not 4"):
        scaled_dot_product_attention(q, k, k, causal=True)
    for shape, heads in [((2, 5, 12), 3), ((2, 5, 3, 2, 4), 4), ((2, 5), 1), ((2, 0, 12), 1)]:
        with pytest.raises(ValueError, match="qkv of"):
            packed_attention(flow.ones(*shape), heads)


def test_the_operators_check_shapes_too() -> None:
    q, k = flow.ones(2, 3, 5, 4), flow.ones(2, 3, 4, 4)
    settings = {"causal": False, "scale": 1.0, "dropout": 0.0}
    with pytest.raises(RuntimeError, match=r"attention needs a query of .* not \(2,3,5,4\)"):
        attention._attention(q, k, q, None, None, **settings)
    with pytest.raises(RuntimeError, match="whose heads divide the query's"):
        attention._attention(q, k[:, :2], k[:, :2], None, None, **settings)
    with pytest.raises(RuntimeError, match="no fewer keys than queries"):
        attention._attention(q, k, k, None, None, **{**settings, "causal": True})
    with pytest.raises(RuntimeError, match="of one dtype"):
        attention._attention(q, q, q.to(flow.bfloat16), None, None, **settings)
    with pytest.raises(RuntimeError, match="packed attention needs a projection"):
        attention._packed(q, None, None, **settings)


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
