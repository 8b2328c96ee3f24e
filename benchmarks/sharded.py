"""Steps of vit_10b's ViT on several processes, against PyTorch (FSDP2 on gloo) and against itself
with all weights in every process. Modes take turns, so that a slow minute of the machine meets all
of them:

    python -m benchmarks.sharded --peer .venv-peer/bin/python
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import settings
from oneflow_accel.errors import UserError
from oneflow_accel.rendezvous import free_port

from flow_train import cli
from flow_train.compare.process import ask, logged
from flow_train.compare.rows import in_turns, medians, show
from flow_train.metrics.log import metric_series

SCRIPT = Path(__file__).resolve().parent.parent / "vit_10b" / "run_vit_training.py"
# What a mode is in our command; in PyTorch's it goes by the same name.
MODES = {
    "replicated": ["--run_without_fsdp"],
    "full": [],
    "no recomputation": ["--no_grad_ckpt"],
}
# The first steps make buffers.
WARM_UP = 2
Figures = tuple[float, float]


def measure(mode: str, asked: dict[str, Any], peer: str | None) -> Figures:
    """Median seconds of a step and a process's peak memory in GB; PyTorch's where there is a
    `peer`, its Python."""
    asked = {**asked, "mode": mode}
    if peer:
        asked |= {"port": free_port(), "warm_up": WARM_UP}
        return tuple(ask([peer, "-m", "benchmarks.peers.sharded", json.dumps(asked)]))
    command = [sys.executable, "-m", "oneflow_accel.launch", "--master_port", "auto"]
    command += ["--nproc_per_node", str(asked["processes"]), str(SCRIPT), "--fake_data"]
    for name in ("image_size", "patch_size", "embed_dim", "num_heads", "num_blocks"):
        command += [f"--{name}", str(asked[name])]
    command += ["--batch_size", str(asked["batch"] * asked["processes"]), "--num_workers", "0"]
    command += ["--max_steps", str(WARM_UP + asked["steps"]), "--log_step_interval", "1"]
    threads = {settings.THREADS.name: str(asked["threads"]), settings.CURVES.name: "off"}
    lines = logged([*command, *MODES[mode]], "--ckpt_dir", threads)
    seconds, memory = (
        metric_series(lines, "train", name)[1] for name in ("step_seconds", "peak_memory_gb")
    )
    return statistics.median(seconds[WARM_UP:]), memory[-1]


# Options, their defaults, and what they are.
OPTIONS = {
    "processes": (2, ""),
    "threads": (1, "per process"),
    "image-size": (56, ""),
    "embed-dim": (768, ""),
    "num-blocks": (16, ""),
    "batch": (2, "per process"),
    "steps": (8, "counted"),
    "rounds": (3, ""),
}


def _measure() -> None:
    parser = cli.Parser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with PyTorch; none: ours only")
    for name, (default, text) in OPTIONS.items():
        said = f"{text} (default: %(default)s)".strip()
        parser.add_argument(f"--{name}", type=cli.at_least(1), default=default, help=said)
    options = parser.parse_args()
    if options.peer and shutil.which(options.peer) is None:
        raise UserError(f"--peer {options.peer}: there is no such program; `make bench` makes one")
    asked = {**vars(options), "patch_size": 14, "num_heads": options.embed_dim // 64}
    sides = {"ours": None, **({"PyTorch": options.peer} if options.peer else {})}
    runs = in_turns(
        [(mode, side) for mode in MODES for side in sides],
        options.rounds,
        lambda run: measure(run[0], asked, sides[run[1]]),
    )
    found = {run: medians(figures) for run, figures in runs.items()}
    rows = [["mode", "side", "s / step", "GB", "to replicated", "PyTorch / ours"]]
    for (mode, side), (seconds, memory) in found.items():
        peer = found.get((mode, "PyTorch")) if side == "ours" else None
        ratio = f"{seconds / found['replicated', side][0]:.2f}"
        over = "" if peer is None else f"{peer[0] / seconds:.2f}"
        rows.append([mode, side, f"{seconds:.3f}", f"{memory:.2f}", ratio, over])
    tokens = (options.image_size // asked["patch_size"]) ** 2
    title = f"D = {options.embed_dim}, {options.num_blocks} blocks, {tokens} tokens, batch "
    title += f"{options.batch} of each of {options.processes} processes, {options.threads} "
    title += f"thread(s) each; {oneflow_accel.current_backend().properties().name}; {date.today()}"
    show(title, rows, left=rows[0], width=110)


if __name__ == "__main__":
    sys.exit(cli.run("sharded", _measure))
