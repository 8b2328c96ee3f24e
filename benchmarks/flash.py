"""Attention without a matrix of time x time beside its plain form: the six numbers of the
FlashAttention diary (milliseconds forward, backward and both, of each form) for this device.

The diary's setting is 64 sequences of 1,024 tokens, 16 heads of 64 numbers, dropout 0.1, not
causal, in float16 on an A100. Here batches are as many as the plain form has memory for, and
numbers are float32, or bfloat16 under autocast (--precision). Every run is a process of its own, in
turns; memory is what a process grows by at its largest, beyond the inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import oneflow_accel
from oneflow_accel import precision
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.attention import HIDDEN, draw_seed, scaled_dot_product_attention

import oneflow as flow

from flow_train import cli
from flow_train.compare.process import call
from flow_train.compare.rows import in_turns, medians, show, timed
from flow_train.metrics.curves import new_figure, save_figure
from flow_train.metrics.work import FLOPS_PER_MAC, attention_macs

GROUP = "flash-attention"
HEADS, DIM = 16, 64
LENGTHS = (256, 512, 1024, 2048, 4096)
# The diary's, on an A100 of 40 GB: milliseconds and ratio.
DIARY = {"forward": (4.52, 19.25), "backward": (9.11, 47.09), "both": (12.98, 67.52)}
# The backward pass computes scores again: five products in place of two (the diary's count).
_FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
_WARM_UP = 1


class Found(NamedTuple):
    """Median seconds, and bytes."""

    forward: float
    backward: float
    size: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def plain_attention(
    query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, *, causal: bool, dropout: float
) -> flow.Tensor:
    """What a program without a fused operation types; its mask is OneFlow's dropout."""
    scores = flow.matmul(query, key, transpose_b=True, alpha=query.shape[-1] ** -0.5)
    if causal:
        later = flow.ones(*scores.shape[-2:]).triu(1) > 0
        scores = scores.masked_fill(later, HIDDEN)
    weights = flow.nn.functional.dropout(scores.softmax(-1), dropout)
    return flow.matmul(weights, value)


def fused_attention(
    query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, *, causal: bool, dropout: float
) -> flow.Tensor:
    drop = {"dropout": dropout, "seed": draw_seed(query)} if dropout else {}
    return scaled_dot_product_attention(query, key, value, causal=causal, **drop)


def timed_steps(
    call: Callable[..., flow.Tensor], inputs: Sequence[flow.Tensor], steps: int, warm_up: int
) -> tuple[float, float, float]:
    """Median seconds of `call` and of its backward pass over `steps`, and the bytes that this
    process grows by at its largest, from the moment that inputs and output gradient are there."""
    device, sync = oneflow_accel.current_backend(), flow._oneflow_internal.eager.Sync
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = flow.ones_like(call(*inputs).detach())
    sync()
    device.empty_cache()
    device.reset_peak_memory_stats()
    before = device.max_memory_allocated() or 0
    times = []
    for _ in range(warm_up + steps):
        for tensor in inputs:
            tensor.grad = None
        out, forward = timed(partial(call, *inputs), sync)
        _, backward = timed(partial(out.backward, gradient), sync)
        times.append((forward, backward))
        del out
    return *medians(times[warm_up:]), (device.max_memory_allocated() or 0) - before


def measure(
    batch: int, length: int, dtype: str, causal: bool, dropout: float, steps: int, plain: bool
) -> tuple[float, ...]:
    """One form in this process, as `Found`."""
    device = oneflow_accel.current_backend()
    attention = plain_attention if plain else fused_attention
    inputs = [flow.randn(batch, HEADS, length, DIM).to(getattr(flow, dtype)) for _ in range(3)]

    def call(*inputs: flow.Tensor) -> flow.Tensor:
        with precision.autocast(device, dtype):
            return attention(*inputs, causal=causal, dropout=dropout)

    return timed_steps(call, inputs, steps, _WARM_UP)


def flops(batch: int, length: int, part: str) -> float:
    """Of the products; a causal one is counted whole."""
    return FLOPS_PER_MAC * batch * attention_macs(length, HEADS * DIM) * _FLOPS[part]


def main(argv: list[str] | None = None) -> int:
    return cli.run("flash", lambda: run(argv))


def run(argv: list[str] | None = None) -> None:
    parser = cli.Parser(prog="python -m benchmarks.flash", description=__doc__)
    parser.add_argument("--batch", type=cli.at_least(1), default=4, help="sequences of 1,024")
    parser.add_argument("--dropout", type=cli.share, default=0.1, help="of weights")
    parser.add_argument("--causal", action="store_true", help="each sees only those before it")
    names = {"choices": ("float32", "bfloat16"), "default": "float32"}
    parser.add_argument("--precision", "--dtype", help="of queries, keys and values", **names)
    parser.add_argument("--rounds", type=cli.at_least(1), default=2, help="processes of each form")
    parser.add_argument("--steps", type=cli.at_least(1), default=3, help="of a process")
    parser.add_argument("--picture", metavar="PNG", type=Path, help="memory and time by length")
    options = parser.parse_args(argv)
    if reason := precision.why_not(oneflow_accel.current_backend(), options.precision):
        raise UserError(f"--precision {options.precision}: {reason}")
    found: dict[int, tuple[int, Found, Found]] = {}
    for length in LENGTHS:
        # The same number of tokens for each length, as far as there are whole sequences.
        batch = max(1, options.batch * 1024 // length)
        setting = (batch, length, options.precision, options.causal, options.dropout)
        started = partial(call, measure, *setting, options.steps)
        runs = in_turns((True, False), options.rounds, started)
        found[length] = batch, Found(*medians(runs[True])), Found(*medians(runs[False]))
    _show(found, options)
    if options.picture:
        draw(found, options.picture)


def _show(found: dict[int, tuple[int, Found, Found]], options: argparse.Namespace) -> None:
    """The six numbers at the diary's length, and both passes at each length."""
    machine = oneflow_accel.current_backend().properties().name
    batch, plain, fused = found[1024]
    title = f"{machine}, {options.precision}, {batch} x 1024, dropout {options.dropout}"
    rows = [["", "fused ms", "plain ms", "ratio", "fused GFLOP/s", "A100: ms", "ms", "ratio"]]
    for part, (theirs, standard) in DIARY.items():
        seconds, other = getattr(fused, part), getattr(plain, part)
        cells = [part, f"{1e3 * seconds:.1f}", f"{1e3 * other:.1f}", f"{other / seconds:.2f}"]
        cells += [f"{flops(batch, 1024, part) / seconds / 1e9:.1f}"]
        rows.append([*cells, f"{theirs:.2f}", f"{standard:.2f}", f"{standard / theirs:.2f}"])
    show(f"{title}; {date.today()}", rows, left=(), width=130)
    rows = [["tokens", "batch", "fused ms", "plain ms", "ratio", "fused MB", "plain MB"]]
    for length, (count, other, ours) in found.items():
        cells = [str(length), str(count), f"{1e3 * ours.both:.0f}", f"{1e3 * other.both:.0f}"]
        cells += [f"{other.both / ours.both:.2f}"]
        rows.append([*cells, f"{ours.size / 1e6:.0f}", f"{other.size / 1e6:.0f}"])
    show("forward and backward by length", rows, left=(), width=130)


def draw(found: dict[int, tuple[int, Found, Found]], path: Path) -> None:
    """Memory and time of one sequence by its length, with lines of growth by T and T^2."""
    figure = new_figure(10, 4, "")
    left, right = figure.subplots(1, 2)
    lengths = list(found)
    for number, (name, color) in enumerate((("plain", "tab:red"), ("fused", "tab:blue")), 1):
        runs = [(found[length][0], found[length][number]) for length in lengths]
        left.plot(lengths, [run.size / 1e6 / n for n, run in runs], "o-", color=color, label=name)
        right.plot(lengths, [1e3 * run.both / n for n, run in runs], "o-", color=color, label=name)
    first = found[lengths[0]][2].size / 1e6 / found[lengths[0]][0]
    grown = [first * length / lengths[0] for length in lengths]
    left.plot(lengths, grown, ":", color="gray", label="linear in T")
    left.set(title="memory, forward and backward", ylabel="MB for a sequence")
    right.set(title="time, forward and backward", ylabel="ms for a sequence")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="tokens T", xticks=lengths)
        axes.set_xticklabels(map(str, lengths))
        axes.minorticks_off()
        axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    raise SystemExit(main())
