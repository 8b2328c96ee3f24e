"""A run that had done its steps when it was killed is finished: validation, test, curves."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import CheckpointError

import pytest

from flow_train.loop import Trainer
from monarch_flow.convert import main as convert
from tests.monarch_flow.engine.engine_runs import assert_same_run, last_checkpoint, values

# 2 epochs of 2 steps.
COMMON = ("trainer.max_epochs=2", "callbacks.ema={decay: 0.9}", "trainer.limit_train_batches=2")


class _KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    from monarch_flow.engine.run import run
    from tests.monarch_flow.engine.engine_runs import config

    folder = tmp_path_factory.mktemp("whole")
    run(config(digits, folder, *COMMON))
    return folder


def test_before_the_test(whole, run_tiny, tmp_path, monkeypatch):
    """Once; then there is nothing left to do."""
    monkeypatch.setenv("FLOW_TRAIN_CURVES", "on")
    run_tiny(tmp_path, *COMMON, "test_after_training=false")
    assert not values(tmp_path, "test")
    metrics = run_tiny(tmp_path, *COMMON, "resume=auto")
    assert metrics["test/loss"] == values(whole, "test")[4]
    best = {"best/val/acc": max(values(whole, "val", "acc1").values())}
    assert metrics.items() >= best.items()
    assert_same_run(tmp_path, whole)
    assert (tmp_path / "curves.png").exists()
    assert run_tiny(tmp_path, *COMMON, "resume=auto") == best
    assert_same_run(tmp_path, whole)


def test_with_the_average_where_no_best_is_kept(run_tiny, tmp_path):
    """The run's own last weights are tested then, with what its callbacks put in their place."""
    keep = "callbacks.model_checkpoint={save_top_k: 0}"
    wanted = run_tiny(tmp_path / "whole", *COMMON, keep)
    run_tiny(tmp_path / "parts", *COMMON, keep, "test_after_training=false")
    found = run_tiny(tmp_path / "parts", *COMMON, keep, "resume=auto")
    assert found["test/loss"] == wanted["test/loss"]


def test_before_the_last_validation(whole, run_tiny, tmp_path, monkeypatch):
    """A checkpoint of the last step, and none of the epoch's end."""
    keep = "callbacks.model_checkpoint.every_n_train_steps=2"

    def killed(trainer: Trainer) -> None:
        if trainer.position.epoch == 2:
            raise _KilledError
        validate(trainer)

    validate = Trainer._validate
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", killed)
        with pytest.raises(_KilledError):
            run_tiny(tmp_path, *COMMON, keep)
    assert last_checkpoint(tmp_path).state["batch"] == 2
    run_tiny(tmp_path, *COMMON, keep, "resume=auto")
    assert_same_run(tmp_path, whole)


def test_a_run_that_had_stopped_early_stays_so(run_tiny, tmp_path):
    frozen = ("optimizer.lr=0.0", "scheduler.lr_min=0.0", "scheduler.warmup_lr_init=0.0")
    common = (*frozen, "trainer.max_epochs=5", "trainer.limit_train_batches=2")
    stop = "callbacks.early_stopping={patience: 1}"
    run_tiny(tmp_path, *common, stop, "test_after_training=false")
    assert sorted(values(tmp_path, "val")) == [2, 4]
    run_tiny(tmp_path, *common, stop, "resume=auto")
    assert sorted(values(tmp_path, "val")) == [2, 4]
    assert list(values(tmp_path, "test")) == [4]
    run_tiny(tmp_path, *common, "callbacks.early_stopping={patience: 2}", "resume=auto")
    assert sorted(values(tmp_path, "val")) == [2, 4, 6]


def test_weights_alone_are_no_run_to_go_on_with(run_tiny, tmp_path):
    dense = "model.mlp_cfg=null"
    run_tiny(tmp_path / "dense", "trainer.max_epochs=1", dense, "test_after_training=false")
    target = tmp_path / "projected"
    assert convert(["project", str(tmp_path / "dense"), str(target), "--config", "monarch"]) == 0
    with pytest.raises(CheckpointError, match=r"no run to go on with.*init_from\.path"):
        run_tiny(tmp_path / "new", f"resume={target}")
    begin = (f"train.init_from.path={target}", "trainer.max_steps=1", "test_after_training=false")
    run_tiny(tmp_path / "new", *begin)
    assert values(tmp_path / "new")[1] < values(tmp_path / "dense")[1]
