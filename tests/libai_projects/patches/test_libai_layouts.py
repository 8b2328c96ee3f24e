"""LiBai's own GPT loses under every parallel layout what a GPT in PyTorch, float64, loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_distributed, run_process

WORKER = ["-m", "tests.libai_projects.patches.layout_worker"]
REFERENCE = json.loads((Path(__file__).parent / "tiny_gpt_losses.json").read_text())
# The issue asks for 1e-5 over six steps. Six steps of float32 come that near to float64 too.
TOLERANCE = 1e-5

# By the number of processes; the layouts of our own GPT-2 take other paths through LiBai.
ROWS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "eager, fused": {"fuse": True, "layer_scaling": True},
        "graph, 4 micro batches, activation checkpoints": {
            "graph": True,
            "accumulate": 4,
            "checkpoint": True,
        },
    },
    2: {
        "DP2": {},
        "TP2, fused": {"tensor": 2, "fuse": True, "layer_scaling": True},
        "PP2 of 3 and 1 layers": {"pipeline": 2, "stages": [0, 0, 0, 1]},
        "graph, PP2, 2 micro batches, activation checkpoints": {
            "graph": True,
            "pipeline": 2,
            "accumulate": 2,
            "checkpoint": True,
        },
    },
}


# A graph of several processes takes seconds to compile, and many more on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", ROWS)
def test_losses_are_those_of_the_reference(processes: int, tmp_path: Path) -> None:
    rows = ROWS[processes]
    output = tmp_path / "losses.json"
    args = [*WORKER, output, *map(json.dumps, rows.values())]
    if processes == 1:
        process = run_process(args, timeout=200)
    else:
        process = run_distributed(args, processes, timeout=400)
    assert process.returncode == 0, process.stdout
    for name, result in zip(rows, json.loads(output.read_text()), strict=True):
        for key in ("losses", "evaluation"):
            np.testing.assert_allclose(
                result[key], REFERENCE[key], rtol=0, atol=TOLERANCE, err_msg=f"{name}: {key}"
            )
