"""Models as global tensors: the batch stays split over the ranks, and the results are one
process's."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch import run_distributed


def test_a_split_batch_gives_one_processs_logits_and_gradients() -> None:
    worker = Path(__file__).with_name("two_rank_models.py")
    run = run_distributed([worker], 2, timeout=90)
    lines = [line for line in run.stdout.splitlines() if line.startswith("results ")]
    assert len(lines) == 1, run.stdout
    results = json.loads(lines[0].removeprefix("results "))
    assert len(results) == 6
    for name, result in results.items():
        # Else every rank would compute the whole batch.
        assert result["split"], name
        assert result["logits"] < 1e-5, (name, result)
        assert result["gradients"] < 1e-5, (name, result)
