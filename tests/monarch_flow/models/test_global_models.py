"""Models as global tensors: the batch is split over the ranks, the results are one process's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_distributed
from tests.monarch_flow.models.two_rank_models import expected_means


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    worker = Path(__file__).with_name("two_rank_models.py")
    run = run_distributed([worker], 2, timeout=90)
    lines = [line for line in run.stdout.splitlines() if line.startswith("results ")]
    assert len(lines) == 1, run.stdout
    found: dict[str, Any] = json.loads(lines[0].removeprefix("results "))
    return found


def test_a_split_batch_gives_one_processs_logits_and_gradients(results) -> None:
    assert len(results["models"]) == 6
    for name, result in results["models"].items():
        # Else every rank would compute the whole batch.
        assert result["split"], name
        assert result["logits"] < 1e-5, (name, result)
        assert result["gradients"] < 1e-5, (name, result)


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_all_ranks_evaluate_with_the_first_ones_statistics(results, way) -> None:
    """Those that the checkpoint has, though each rank has gathered its own images'."""
    first, second = results["statistics"][way]
    np.testing.assert_allclose(first, expected_means(), rtol=1e-5)
    assert first == second
