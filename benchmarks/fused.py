"""What fused operations are worth on this device: each, forward and backward, beside its form of
plain operators, which runs where ONEFLOW_ACCEL_DISABLE names it.

Every run is a process of its own, in turns. Memory is what the process grows by at its largest,
from the moment that inputs and output gradients are there.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date

import oneflow_accel
from oneflow_accel import settings
from oneflow_accel.errors import UserError, nearest
from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.loss import cross_entropy, linear_cross_entropy_mean
from oneflow_accel.kernels.transformer import add_rms_norm, rope, swiglu

import oneflow as flow
from rich.console import Console
from rich.table import Table

from flow_train import cli

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


def measure(name: str) -> tuple[float, int]:
    """Median seconds of a step in this process, and bytes."""
    device = oneflow_accel.current_backend()
    shapes, call = OPERATIONS[name]
    inputs = [flow.randn(*shape).requires_grad_() for shape in shapes]
    gradient = flow.ones_like(call(*inputs).detach())
    flow._oneflow_internal.eager.Sync()
    device.empty_cache()
    device.reset_peak_memory_stats()
    before = device.max_memory_allocated() or 0
    seconds = []
    for _ in range(WARM_UP + STEPS):
        for tensor in inputs:
            tensor.grad = None
        start = time.perf_counter()
        call(*inputs).backward(gradient)
        flow._oneflow_internal.eager.Sync()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:]), (device.max_memory_allocated() or 0) - before


# What else is switched off for the plain form, as it is fused too.
ALSO_OFF = {"linear_cross_entropy_mean": "linear_cross_entropy cross_entropy"}


def _started(name: str, plain: bool) -> tuple[float, int]:
    off = [name, *ALSO_OFF.get(name, "").split()] if plain else []
    environment = {**os.environ, settings.DISABLE.name: ",".join(off)}
    command = [sys.executable, "-m", "benchmarks.fused", "--in-this-process", "--only", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    seconds, size = json.loads(done.stdout.splitlines()[-1])
    return seconds, size


def _known(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in OPERATIONS:
            near = nearest(name, OPERATIONS)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UserError(f"--only {name}: there are {', '.join(OPERATIONS)}.{hint}")
    return names


def main() -> int:
    return cli.run("fused", _main)


def _main() -> None:
    parser = cli.Parser(prog="python -m benchmarks.fused", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="operations, with commas between; else all")
    parser.add_argument("--rounds", type=cli.at_least(1), default=3, help="(default: %(default)s)")
    parser.add_argument("--in-this-process", action="store_true", help="one, printed as JSON")
    options = parser.parse_args()
    names = _known(options.only) if options.only else list(OPERATIONS)
    if options.in_this_process:
        print(json.dumps([measure(name) for name in names][-1]))
        return
    table = Table(title=f"{oneflow_accel.current_backend().properties().name}; {date.today()}")
    for column in ("operation", "inputs", "plain ms", "fused ms", "ratio", "plain MB", "fused MB"):
        table.add_column(column, no_wrap=column == "operation")
    for name in names:
        runs = [(_started(name, True), _started(name, False)) for _ in range(options.rounds)]
        plain, fused = zip(*runs, strict=True)
        times = [statistics.median(seconds for seconds, _ in each) for each in (plain, fused)]
        sizes = [statistics.median(size for _, size in each) / 1e6 for each in (plain, fused)]
        largest = max(OPERATIONS[name][0], key=math.prod)
        table.add_row(
            name,
            " x ".join(map(str, largest)),
            *(f"{1000 * seconds:.1f}" for seconds in times),
            f"{times[0] / times[1]:.2f}",
            *(f"{size:.0f}" for size in sizes),
        )
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
