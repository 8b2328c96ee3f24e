"""Attention without a matrix of time x time beside its plain form: the six numbers of the
FlashAttention diary (milliseconds forward, backward and both, of each form) for this device.

The diary's setting is 64 sequences of 1,024 tokens, 16 heads of 64 numbers, dropout 0.1, not
causal, in float16 on an A100. Here batches are as many as the plain form has memory for, and
numbers are float32, or bfloat16 under autocast (--precision). Every run is a process of its own, in
turns; memory is what a process grows by at its largest, beyond the inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import oneflow_accel
from oneflow_accel import precision
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.attention import HIDDEN, draw_seed, scaled_dot_product_attention

import oneflow as flow
from rich.console import Console
from rich.table import Table

from flow_train import cli
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


def measure(options: argparse.Namespace) -> Found:
    """In this process."""
    batch, length, steps = options.batch, options.length, options.steps
    attention = plain_attention if options.plain else fused_attention
    device = oneflow_accel.current_backend()
    dtype = getattr(flow, options.precision)
    *inputs, gradient = [flow.randn(batch, HEADS, length, DIM).to(dtype) for _ in range(4)]
    for tensor in inputs:
        tensor.requires_grad_()
    flow._oneflow_internal.eager.Sync()
    device.empty_cache()
    device.reset_peak_memory_stats()
    before = device.max_memory_allocated() or 0
    times: list[tuple[float, float]] = []
    for _ in range(_WARM_UP + steps):
        for tensor in inputs:
            tensor.grad = None
        start = time.perf_counter()
        with precision.autocast(device, options.precision):
            out = attention(*inputs, causal=options.causal, dropout=options.dropout)
        flow._oneflow_internal.eager.Sync()
        between = time.perf_counter()
        out.backward(gradient.to(out.dtype))
        flow._oneflow_internal.eager.Sync()
        times.append((between - start, time.perf_counter() - between))
        del out
    forward, backward = (statistics.median(part) for part in zip(*times[_WARM_UP:], strict=True))
    return Found(forward, backward, (device.max_memory_allocated() or 0) - before)


def flops(batch: int, length: int, part: str) -> float:
    """Of the products; a causal one is counted whole."""
    return FLOPS_PER_MAC * batch * attention_macs(length, HEADS * DIM) * _FLOPS[part]


def _started(plain: bool, arguments: list[str]) -> Found:
    command = [sys.executable, "-m", "benchmarks.flash", "--in-this-process", *arguments]
    command += ["--plain"] if plain else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return Found(*json.loads(done.stdout.splitlines()[-1]))


def _median(runs: list[Found]) -> Found:
    return Found(*(statistics.median(each) for each in zip(*runs, strict=True)))


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
    parser.add_argument("--length", type=cli.at_least(1), default=1024, help=argparse.SUPPRESS)
    parser.add_argument("--in-this-process", action="store_true", help="one form, as JSON")
    parser.add_argument("--plain", action="store_true", help="that form is the plain one")
    options = parser.parse_args(argv)
    if options.in_this_process:
        print(json.dumps(measure(options)))
        return
    if reason := precision.why_not(oneflow_accel.current_backend(), options.precision):
        raise UserError(f"--precision {options.precision}: {reason}")
    found: dict[int, tuple[int, Found, Found]] = {}
    for length in LENGTHS:
        # The same number of tokens for each length, as far as there are whole sequences.
        batch = max(1, options.batch * 1024 // length)
        arguments = ["--batch", str(batch), "--length", str(length)]
        arguments += ["--dropout", str(options.dropout), "--steps", str(options.steps)]
        arguments += ["--precision", options.precision, *["--causal"] * options.causal]
        runs = [
            (_started(True, arguments), _started(False, arguments)) for _ in range(options.rounds)
        ]
        plain, fused = (_median(list(each)) for each in zip(*runs, strict=True))
        found[length] = batch, plain, fused
    console = Console(width=None if sys.stdout.isatty() else 130)
    for table in tables(found, options.dropout, options.precision):
        console.print(table)
    if options.picture:
        draw(found, options.picture)


def tables(
    found: dict[int, tuple[int, Found, Found]], dropout: float, dtype: str = "float32"
) -> list[Table]:
    """The six numbers at the diary's length, and both passes at each length."""
    machine = oneflow_accel.current_backend().properties().name
    batch, plain, fused = found[1024]
    first = Table(title=f"{machine}, {dtype}, {batch} x 1024, dropout {dropout}; {date.today()}")
    for column in ("", "fused ms", "plain ms", "ratio", "fused GFLOP/s", "A100: ms", "ms", "ratio"):
        first.add_column(column, justify="right")
    for part, (theirs, standard) in DIARY.items():
        seconds, other = getattr(fused, part), getattr(plain, part)
        first.add_row(
            part,
            f"{1e3 * seconds:.1f}",
            f"{1e3 * other:.1f}",
            f"{other / seconds:.2f}",
            f"{flops(batch, 1024, part) / seconds / 1e9:.1f}",
            f"{theirs:.2f}",
            f"{standard:.2f}",
            f"{standard / theirs:.2f}",
        )
    second = Table(title="forward and backward by length")
    for column in ("tokens", "batch", "fused ms", "plain ms", "ratio", "fused MB", "plain MB"):
        second.add_column(column, justify="right")
    for length, (count, other, ours) in found.items():
        second.add_row(
            str(length),
            str(count),
            f"{1e3 * ours.both:.0f}",
            f"{1e3 * other.both:.0f}",
            f"{other.both / ours.both:.2f}",
            f"{ours.size / 1e6:.0f}",
            f"{other.size / 1e6:.0f}",
        )
    return [first, second]


def draw(found: dict[int, tuple[int, Found, Found]], path: Path) -> None:
    """Memory and time of one sequence by its length, with lines of growth by T and T^2."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
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
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
