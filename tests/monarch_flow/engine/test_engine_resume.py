"""A run that was stopped and resumed equals one that was not."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import pytest

from tests.monarch_flow.engine.engine_runs import (
    EVERYTHING,
    assert_same_run,
    config,
    last_checkpoint,
    values,
)


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    """An uninterrupted run of 4 epochs with 8 steps each, dense from epoch 2 on."""
    from monarch_flow.engine.run import run

    folder = tmp_path_factory.mktemp("whole")
    run(config(digits, folder, *_LONG))
    return folder


_LONG = (*EVERYTHING, "trainer.max_epochs=4", "train.sparse_to_dense.fraction=0.5")


def test_resumed_run_equals_the_whole_one(whole, run_tiny, tmp_path):
    """Inside an epoch, to the last bit; the run to compare with has no checkpoint at that step.
    At a switch and after it: test_vitae_sparse_to_dense.py."""
    run_tiny(tmp_path, *_LONG, "trainer.max_steps=11", "test_after_training=false")
    assert last_checkpoint(tmp_path).state["phase"] == "monarch"
    run_tiny(tmp_path, *_LONG, "resume=auto")
    assert_same_run(tmp_path, whole)


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


REFUSED = {
    "another model": ("resume=auto", "model.name=vit_tiny_patch8_64"),
    r"(?s)another model.*\(64, 1, 7, 7\) in the model": ("resume=auto", "model.embed_dim=64"),
    "(?s)blkdiag1.*convert densify": ("resume=auto", "model.mlp_cfg=null"),
    "began with 3": ("resume=auto", "seed=4", "trainer.max_epochs=2"),
    "already holds a run": ("trainer.max_epochs=1",),
}


def test_what_cannot_be_resumed(run_tiny, tmp_path):
    run_tiny(tmp_path, "trainer.max_epochs=1", "test_after_training=false")
    for text, overrides in REFUSED.items():
        with pytest.raises(UserError, match=text):
            run_tiny(tmp_path, *overrides)
    assert list(values(tmp_path)) == list(range(1, 9))
    # A moving average may begin later.
    run_tiny(tmp_path, "resume=auto", "callbacks.ema={decay: 0.9}", "trainer.max_epochs=2")
    assert list(values(tmp_path)) == list(range(1, 17))
