"""Lines and files of each package, beside its budget. Exit code 1 where one is over it.

A commit that raises a budget says what it bought and which lines it made needless.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracked import ROOT, listed_files

# What is counted: where, the ends of its files' names, and the most lines it may have.
BUDGETS = {
    "oneflow_accel": ("oneflow_accel", (".py",), 10_357),
    "oneflow_accel/csrc": ("oneflow_accel/csrc", (".cpp", ".h"), 14_944),
    "oneflow_accel/emulated": ("oneflow_accel/emulated", (".cpp", ".h"), 1_605),
    "flow_train": ("flow_train", (".py",), 13_325),
    "monarch_flow": ("monarch_flow", (".py",), 7_323),
    "resnet50_imagenet": ("resnet50_imagenet", (".py",), 1_061),
    "vit_10b": ("vit_10b", (".py",), 985),
    "libai_projects": ("libai_projects", (".py",), 14_911),
    "benchmarks": ("benchmarks", (".py",), 3_627),
    "scripts": ("scripts", (".py",), 1_179),
    "patches": ("patches", (".patch",), 1_412),
    "tests": ("tests", (".py",), 56_641),
}


def counts(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Files and lines by name, of what git tracks or could add."""
    files = listed_files(root)
    found = {}
    for name, (folder, ends, _) in BUDGETS.items():
        own = [path for path in files if path.startswith(f"{folder}/") and path.endswith(ends)]
        lines = sum((root / path).read_bytes().count(b"\n") for path in own)
        found[name] = (len(own), lines)
    return found


def main(root: Path = ROOT) -> int:
    over = 0
    for name, (files, lines) in counts(root).items():
        budget = BUDGETS[name][2]
        over += lines > budget
        mark = f"  over by {lines - budget:,}" if lines > budget else ""
        print(f"{name:20} {files:4} files {lines:7,} lines of {budget:7,}{mark}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
