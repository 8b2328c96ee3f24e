"""ResNet50 on this machine: our plug-in, stock OneFlow and PyTorch in one run.

    make bench

Writes benchmarks/results/resnet50.csv and prints the same as a table.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys

import oneflow_accel

from rich.console import Console
from rich.table import Table

from benchmarks.side_by_side import REPOSITORY, Program, measure

PEER_SCRIPT = REPOSITORY / "benchmarks" / "peers" / "torch_resnet50.py"
RESULTS = REPOSITORY / "benchmarks" / "results" / "resnet50.csv"
# All ratios are against this one.
PEER = "PyTorch, channels last"


def _programs(mode: str, batch: int, threads: int, peer_python: str) -> list[Program]:
    arguments = ["--batch", str(batch), "--mode", mode]
    ours = [sys.executable, "-m", "benchmarks.oneflow_resnet50", *arguments]
    theirs = [peer_python, str(PEER_SCRIPT), *arguments, "--threads", str(threads)]
    env = {"ONEFLOW_ACCEL_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return [
        Program("ours, NHWC", [*ours, "--channels-last"], env),
        Program("ours, NHWC, nn.Graph", [*ours, "--channels-last", "--graph"], env),
        Program("ours, NCHW", ours, env),
        Program("stock OneFlow, NCHW", ours, {**env, "ONEFLOW_ACCEL_PLUGIN": "off"}),
        Program(PEER, [*theirs, "--channels-last"], env),
        Program("PyTorch, NCHW", theirs, env),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="the Python that has PyTorch")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, the median counts")
    parser.add_argument("--batch", type=int, default=8, help="images a step")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    machine = f"{oneflow_accel.current_backend().properties().name}, {threads} threads"
    today = datetime.date.today().isoformat()
    rows = []
    table = Table(title=f"ResNet50, batch {options.batch}, float32, {machine}, {today}")
    for column in ("what", "program", "img/s", "ratio to PyTorch channels last"):
        table.add_column(column, justify="left" if column in ("what", "program") else "right")
    for mode, steps in (("forward", 5), ("train", 3)):
        programs = _programs(mode, options.batch, threads, options.peer)
        measure(programs, rounds=options.rounds, steps=steps)
        peer = next(program for program in programs if program.name == PEER)
        for program in programs:
            ratio = peer.median / program.median
            rate = options.batch / program.median
            rows.append(
                {
                    "date": today,
                    "machine": machine,
                    "what": mode,
                    "batch": options.batch,
                    "program": program.name,
                    "version": program.version,
                    "images_per_second": f"{rate:.2f}",
                    "ratio": f"{ratio:.3f}",
                    "rounds": options.rounds,
                }
            )
            table.add_row(mode, program.name, f"{rate:.2f}", f"{ratio:.2f}")
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    Console().print(table)
    print(f"written to {RESULTS.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
