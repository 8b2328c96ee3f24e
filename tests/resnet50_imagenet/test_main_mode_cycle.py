"""main.py handed on between eager mode, nn.Graph, one process and two equals one in one go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flow_train.checkpoint.folders import read_checkpoint
from tests.modes import ALL, handed_on
from tests.resnet50_imagenet.conftest import SMALL, RunMain, losses

# Processes and options.
MODES = ((1, ()), (1, ("--graph",)), (2, ()), (2, ("--graph",)))
STEPS = 2


@pytest.mark.timeout(600)
def test_a_run_that_is_handed_on_equals_one_in_one_go(
    shapes: Path, run_main: RunMain, tmp_path: Path
) -> None:
    """Losses, weights and momentum; batch normalization's statistics are of a process's images."""
    # Eager, graph, two processes; with ALL=1 from each to each.
    modes = handed_on(MODES) if ALL else MODES[:3]
    whole, handed = tmp_path / "whole", tmp_path / "handed"
    common = (shapes, *SMALL, "--freeze-bn", "--resume", "auto")
    run_main(*common, "--max-steps", str(STEPS * len(modes)), "--output-dir", whole)
    for number, (processes, options) in enumerate(modes, start=1):
        steps = ("--max-steps", str(STEPS * number), "--output-dir", handed)
        run_main(*common, *options, *steps, processes=processes)
    ours, theirs = losses(handed), losses(whole)
    assert list(ours) == list(theirs) == list(range(1, STEPS * len(modes) + 1))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=0, atol=1e-5)
    ours, theirs = (read_checkpoint(out / "checkpoints") for out in (handed, whole))
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for name, array in {**theirs.model, **theirs.optimizer}.items():
        found = {**ours.model, **ours.optimizer}[name]
        error = np.linalg.norm((found - array).ravel())
        assert error <= 5e-4 * np.linalg.norm(array.ravel()), name
