"""A run that was stopped, killed or told to end, and resumed, equals one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.launch import REPOSITORY
from tests.monarch_flow.engine.engine_runs import (
    EVERYTHING,
    assert_same_run,
    config,
    last_checkpoint,
    values,
)

SCRIPT = Path(__file__).parent / "engine_runs.py"


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    """An uninterrupted run of 4 epochs with 8 steps each, dense from epoch 2 on."""
    from monarch_flow.engine.run import run

    folder = tmp_path_factory.mktemp("whole")
    run(config(digits, folder, *_LONG))
    return folder


_LONG = (*EVERYTHING, "trainer.max_epochs=4", "train.sparse_to_dense.fraction=0.5")


@pytest.mark.parametrize(
    ("stop", "phase"),
    [
        pytest.param("trainer.max_steps=11", "monarch", id="inside-an-epoch"),
        pytest.param("trainer.max_steps=16", "monarch", id="at-the-switch"),
        pytest.param("trainer.max_steps=21", "dense", id="after-the-switch"),
    ],
)
def test_resumed_run_equals_the_whole_one(whole, run_tiny, tmp_path, stop, phase):
    """To the last bit; the run to compare with has no checkpoint at that step."""
    run_tiny(tmp_path, *_LONG, stop, "test_after_training=false")
    assert last_checkpoint(tmp_path).state["phase"] == phase
    run_tiny(tmp_path, *_LONG, "resume=auto")
    assert_same_run(tmp_path, whole)


def test_switch_to_dense_does_not_move_the_loss(whole):
    before, after = (values(whole, "switch", f"loss_{when}") for when in ("before", "after"))
    assert list(before) == [16]
    assert after[16] == pytest.approx(before[16], rel=1e-5)
    arrays = last_checkpoint(whole)
    assert arrays.model["blocks.0.mlp.fc1.weight"].shape == (64, 32)
    assert not [name for name in (*arrays.model, *arrays.optimizer) if "blkdiag" in name]
    for prefix in ("exp_avg/", "exp_avg_sq/", "ema/"):
        assert prefix + "blocks.0.mlp.fc1.weight" in arrays.optimizer


def test_evaluation_of_a_run_that_became_dense(whole, run_tiny, tmp_path):
    """By the configuration it was trained with, whose layers are Monarch."""
    found = run_tiny(tmp_path, f"eval.ckpt={whole / 'checkpoints/latest'}", "eval.run_test=false")
    assert found["val/loss"] == list(values(whole, "val").values())[-1]


def test_switch_under_graph_and_resume_the_other_way(run_tiny, tmp_path):
    """A graph of Monarch layers, one of dense ones, then eager. Dropout's masks are the same."""
    common = ("trainer.max_epochs=2", "train.sparse_to_dense.fraction=0.5")
    common += ("callbacks.ema={decay: 0.9}", "test_after_training=false", "model.drop_rate=0.1")
    run_tiny(tmp_path / "eager", *common)
    run_tiny(tmp_path / "graph", *common, "trainer.graph=true", "trainer.max_steps=12")
    run_tiny(tmp_path / "graph", *common, "resume=auto")
    for split in ("train", "val"):
        ours, theirs = (values(tmp_path / way, split) for way in ("graph", "eager"))
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def test_checkpoint_by_path_continues_elsewhere(run_tiny, tmp_path):
    run_tiny(tmp_path / "a", "trainer.max_epochs=1")
    path = tmp_path / "a/checkpoints/latest"
    run_tiny(tmp_path / "b", "trainer.max_epochs=2", f"resume={path}")
    assert list(values(tmp_path / "b")) == list(range(9, 17))
    # What was the best in the other folder is not there, so this one has its own.
    assert (tmp_path / "b/checkpoints/best").read_text().strip() == "step-00000016"


def _start(path: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait_for_steps(process: subprocess.Popen, run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + 60
    log = run_dir / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no step within 60 s"
        time.sleep(0.01)


def test_told_to_end_and_killed_and_resumed(digits, run_tiny, tmp_path):
    """SIGTERM writes a checkpoint though data workers get it too; SIGKILL leaves the one before."""
    common = (*EVERYTHING, "trainer.max_epochs=40", "datamodule.num_workers=2")
    parts, path = tmp_path / "parts", tmp_path / "cfg.yaml"
    OmegaConf.save(config(digits, parts, *common, "resume=auto"), path)
    process = _start(path)
    _wait_for_steps(process, parts, 11)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "resume=auto" in output
    steps = max(values(parts))
    assert last_checkpoint(parts).state["step"] == steps
    process = _start(path)
    _wait_for_steps(process, parts, len(values(parts)) + 12)
    process.kill()
    process.communicate(timeout=60)
    resumed_from = last_checkpoint(parts).state["step"]
    assert steps <= resumed_from < 320
    end = -(-(resumed_from + 3) // 8)
    common = (*EVERYTHING, f"trainer.max_epochs={end}", "test_after_training=false")
    run_tiny(parts, *common, "resume=auto")
    run_tiny(tmp_path / "whole", *common)
    assert_same_run(parts, tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        pytest.param(
            ("model.name=vit_tiny_patch8_64",), CheckpointError, "another model", id="name"
        ),
        pytest.param(("model.embed_dim=64",), CheckpointError, "another model", id="sizes"),
        pytest.param(
            ("model.mlp_cfg=null",), CheckpointError, "(?s)blkdiag1.*convert densify", id="layers"
        ),
        pytest.param(("seed=4", "trainer.max_epochs=2"), UserError, "began with 3", id="seed"),
        pytest.param(
            ("callbacks.ema={decay: 0.9}", "trainer.max_epochs=2"),
            UserError,
            None,
            id="average-from-here-on",
        ),
    ],
)
def test_what_cannot_be_resumed(run_tiny, tmp_path, overrides, error, text):
    run_tiny(tmp_path, "trainer.max_epochs=1", "test_after_training=false")
    args = ("trainer.max_epochs=1", "resume=auto", *overrides)
    if text is None:
        run_tiny(tmp_path, *args)
        return
    with pytest.raises(error, match=text):
        run_tiny(tmp_path, *args)


def test_another_runs_folder_is_not_overwritten(run_tiny, tmp_path):
    run_tiny(tmp_path, "trainer.max_epochs=1", "test_after_training=false")
    with pytest.raises(CheckpointError, match="already holds a run"):
        run_tiny(tmp_path, "trainer.max_epochs=1")
    assert list(values(tmp_path)) == list(range(1, 9))
