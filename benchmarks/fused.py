"""What fused operations are worth on this device: each, forward and backward, beside its form of
plain operators, which runs where ONEFLOW_ACCEL_DISABLE names it.

Every run is a process of its own, in turns. Memory is what the process grows by at its largest,
from the moment that inputs and output gradients are there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial

import oneflow_accel
from oneflow_accel import settings
from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.loss import cross_entropy, linear_cross_entropy_mean
from oneflow_accel.kernels.transformer import add_rms_norm, rope, swiglu

import oneflow as flow

from benchmarks.flash import timed_steps
from flow_train import cli
from flow_train.compare.process import call
from flow_train.compare.rows import in_turns, medians, show

Shape = tuple[int, ...]
# Steps of a process; the first ones make buffers.
WARM_UP, STEPS = 2, 8


def _add_rms_norm(x: flow.Tensor, residual: flow.Tensor, weight: flow.Tensor) -> flow.Tensor:
    return add_rms_norm(x, residual, weight, epsilon=1e-5)[0]


# Angles are the same for a whole run.
_ANGLES = flow.arange(2048).reshape(-1, 1) * flow.rand(1, 32)
_TABLES = _ANGLES.cos(), _ANGLES.sin()
_LABELS = flow.arange(2048) * 7
# Of Llama's layers of width 1,024 with 2,048 tokens: by the name to switch off, inputs and call.
OPERATIONS: dict[str, tuple[Sequence[Shape], Callable[..., flow.Tensor]]] = {
    "rope": ([(1, 2048, 16, 64)], lambda x: rope(x, *_TABLES)),
    "add_rms_norm": ([(2048, 1024), (2048, 1024), (1024,)], _add_rms_norm),
    "swiglu": ([(2048, 2816)] * 2, swiglu),
    "scaled_dot_product_attention": (
        [(1, 16, 2048, 64)] * 3,
        lambda *qkv: scaled_dot_product_attention(*qkv, causal=True),
    ),
    "cross_entropy": ([(2048, 32000)], lambda logits: cross_entropy(logits, _LABELS)),
    "linear_cross_entropy_mean": (
        [(2048, 512), (32000, 512)],
        lambda x, weight: linear_cross_entropy_mean(x, weight, _LABELS),
    ),
}


def measure(name: str) -> tuple[float, float]:
    """Median seconds of a step in this process, and bytes."""
    shapes, call = OPERATIONS[name]
    inputs = [flow.randn(*shape) for shape in shapes]
    forward, backward, size = timed_steps(call, inputs, STEPS, WARM_UP)
    return forward + backward, size


# What else is switched off for the plain form, as it is fused too.
ALSO_OFF = {"linear_cross_entropy_mean": "linear_cross_entropy cross_entropy"}


def _started(name: str, plain: bool) -> tuple[float, float]:
    off = [name, *ALSO_OFF.get(name, "").split()] if plain else []
    seconds, size = call(measure, name, environment={settings.DISABLE.name: ",".join(off)})
    return seconds, size


def _main() -> None:
    parser = cli.Parser(prog="python -m benchmarks.fused", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, help="these; else all")
    parser.add_argument("--rounds", type=cli.at_least(1), default=3, help="(default: %(default)s)")
    options = parser.parse_args()
    rows = [["operation", "inputs", "plain ms", "fused ms", "ratio", "plain MB", "fused MB"]]
    for name in options.only or OPERATIONS:
        runs = in_turns((True, False), options.rounds, partial(_started, name))
        (plain, plain_size), (fused, fused_size) = map(medians, runs.values())
        times = [f"{1e3 * plain:.1f}", f"{1e3 * fused:.1f}", f"{plain / fused:.2f}"]
        largest = " x ".join(map(str, max(OPERATIONS[name][0], key=math.prod)))
        rows.append([name, largest, *times, f"{plain_size / 1e6:.0f}", f"{fused_size / 1e6:.0f}"])
    title = f"{oneflow_accel.current_backend().properties().name}; {date.today()}"
    show(title, rows, left=rows[0])


if __name__ == "__main__":
    sys.exit(cli.run("fused", _main))
