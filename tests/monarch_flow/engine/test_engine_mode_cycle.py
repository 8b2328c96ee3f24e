"""A run handed on between eager mode and nn.Graph, one process and two, equals one in one go; two
processes eagerly: test_training_engine.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.launch import run_distributed
from tests.monarch_flow.engine.engine_runs import config, last_checkpoint, values

# Whether under nn.Graph, and how many processes.
MODES = ((False, 1), (True, 1), (True, 2), (False, 1))
STEPS = 2


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_run_that_is_handed_on_equals_one_in_one_go(
    digits: Path, run_tiny, tmp_path: Path
) -> None:
    """Losses, weights, AdamW's moments; with an epoch's end, schedule, clipping and average."""
    whole, handed = tmp_path / "whole", tmp_path / "handed"
    common = (
        "trainer.max_epochs=20",
        "trainer.gradient_clip_val=1.0",
        "callbacks.ema={decay: 0.9}",
    )
    common += ("test_after_training=false", "train.scheduler_interval=step")
    run_tiny(whole, *common, f"trainer.max_steps={STEPS * len(MODES)}")
    for number, (graph, processes) in enumerate(MODES, start=1):
        options = (
            f"trainer.graph={str(graph).lower()}",
            f"trainer.max_steps={STEPS * number}",
            f"datamodule.batch_size={16 // processes}",
            "resume=auto",
        )
        if processes == 1:
            run_tiny(handed, *common, *options)
            continue
        file = tmp_path / f"{number}.yaml"
        OmegaConf.save(config(digits, handed, *common, *options), file)
        script = Path(__file__).with_name("engine_runs.py")
        result = run_distributed([script, file], processes, timeout=150)
        assert result.returncode == 0, result.stdout
    assert list(values(handed)) == list(range(1, STEPS * len(MODES) + 1))
    for split in ("train", "val"):
        ours, theirs = values(handed, split), values(whole, split)
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=0, atol=1e-5)
    ours, theirs = last_checkpoint(handed), last_checkpoint(whole)
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for name, array in {**theirs.model, **theirs.optimizer}.items():
        found = {**ours.model, **ours.optimizer}[name]
        error = np.linalg.norm((found - array).ravel())
        assert error <= 5e-4 * np.linalg.norm(array.ravel()), name
