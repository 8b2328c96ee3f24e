"""Steps of vit_10b's ViT on several processes, against PyTorch (FSDP2 on gloo) and against itself
with all weights in every process. Modes take turns, so that a slow minute of the machine meets all
of them:

    python -m benchmarks.sharded --peer .venv-peer/bin/python
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel.errors import UserError
from oneflow_accel.rendezvous import free_port

from rich.console import Console
from rich.table import Table

from flow_train import cli
from flow_train.metrics.log import JSONL_NAME

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


def ours(asked: dict[str, Any]) -> Figures:
    """Median seconds of a step and a process's peak memory in GB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "oneflow_accel.launch", "--master_port", "auto"]
        command += ["--nproc_per_node", str(asked["processes"]), str(SCRIPT), "--fake_data"]
        for name in ("image_size", "patch_size", "embed_dim", "num_heads", "num_blocks"):
            command += [f"--{name}", str(asked[name])]
        command += ["--batch_size", str(asked["batch"] * asked["processes"]), "--num_workers", "0"]
        command += ["--max_steps", str(WARM_UP + asked["steps"]), "--log_step_interval", "1"]
        command += ["--ckpt_dir", folder, *MODES[asked["mode"]]]
        _run(command, {"ONEFLOW_ACCEL_THREADS": str(asked["threads"]), "FLOW_TRAIN_CURVES": "off"})
        lines = map(json.loads, (Path(folder) / JSONL_NAME).read_text().splitlines())
        values = [line["values"] for line in lines if line["split"] == "train"]
    seconds = statistics.median(line["step_seconds"] for line in values[WARM_UP:])
    return seconds, values[-1]["peak_memory_gb"]


def theirs(python: str, asked: dict[str, Any]) -> Figures:
    asked = {**asked, "port": free_port(), "warm_up": WARM_UP}
    output = _run([python, "-m", "benchmarks.peers.sharded", json.dumps(asked)], {})
    seconds, memory = json.loads(output.splitlines()[-1])
    return seconds, memory


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900
    )
    if done.returncode != 0:
        text = (done.stdout + done.stderr)[-2000:]
        raise UserError(f"{' '.join(command[:4])} ... failed:\n{text}")
    return done.stdout


def main() -> int:
    return cli.run("sharded", _measure)


def _measure() -> None:
    parser = cli.Parser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with PyTorch; none: ours only")
    parser.add_argument(
        "--processes", type=cli.at_least(1), default=2, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=cli.at_least(1), default=1, help="per process (default: %(default)s)"
    )
    parser.add_argument(
        "--image-size", type=cli.at_least(1), default=56, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--embed-dim", type=cli.at_least(1), default=768, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--num-blocks", type=cli.at_least(1), default=16, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=cli.at_least(1), default=2, help="per process (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=cli.at_least(1), default=8, help="counted (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=cli.at_least(1), default=3, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.peer and shutil.which(options.peer) is None:
        raise UserError(f"--peer {options.peer}: there is no such program; `make bench` makes one")
    shape = {name: getattr(options, name) for name in ("image_size", "embed_dim", "num_blocks")}
    shape |= {"patch_size": 14, "num_heads": options.embed_dim // 64, "steps": options.steps}
    shape |= {name: getattr(options, name) for name in ("processes", "threads", "batch")}
    found: dict[tuple[str, str], list[Figures]] = {}
    for _ in range(options.rounds):
        for mode in MODES:
            asked = {**shape, "mode": mode}
            found.setdefault((mode, "ours"), []).append(ours(asked))
            if options.peer:
                found.setdefault((mode, "PyTorch"), []).append(theirs(options.peer, asked))
    _print(found, shape)


def _print(found: dict[tuple[str, str], list[Figures]], shape: dict[str, Any]) -> None:
    device = oneflow_accel.current_backend().properties().name
    tokens = (shape["image_size"] // shape["patch_size"]) ** 2
    title = f"D = {shape['embed_dim']}, {shape['num_blocks']} blocks, {tokens} tokens, batch "
    title += f"{shape['batch']} of each of {shape['processes']} processes, {shape['threads']} "
    title += f"thread(s) each; {device}; {date.today()}"
    table = Table(title=title)
    for column in ("mode", "side", "s / step", "GB", "to replicated", "PyTorch / ours"):
        table.add_column(column)
    medians = {
        key: tuple(statistics.median(part) for part in zip(*runs, strict=True))
        for key, runs in found.items()
    }
    for (mode, side), (seconds, memory) in medians.items():
        whole = medians["replicated", side][0]
        peer = medians.get((mode, "PyTorch")) if side == "ours" else None
        ratio = "" if peer is None else f"{peer[0] / seconds:.2f}"
        table.add_row(
            mode, side, f"{seconds:.3f}", f"{memory:.2f}", f"{seconds / whole:.2f}", ratio
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
