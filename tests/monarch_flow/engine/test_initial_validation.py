"""Validation before the first step."""

from __future__ import annotations

import pytest

from tests.monarch_flow.engine.engine_runs import values

ON = ("callbacks.initial_validation={}", "test_after_training=false")


def test_weights_of_another_run_are_validated_as_they_are(run_tiny, tmp_path):
    """Their loss is that of the run they come from, eagerly and under nn.Graph."""
    average = "callbacks.ema={decay: 0.5}"
    run_tiny(tmp_path / "first", average, "test_after_training=false")
    expected = values(tmp_path / "first", "val")[16]
    # The moving average is of these weights by then.
    common = (*ON, average, "trainer.max_epochs=1")
    start = f"train.init_from.path={tmp_path / 'first/checkpoints/latest'}"
    for way in ("eager", "graph"):
        graph = f"trainer.graph={str(way == 'graph').lower()}"
        run_tiny(tmp_path / way, *common, start, graph)
        losses = values(tmp_path / way, "val")
        assert list(losses) == [0, 8]
        assert losses[0] == pytest.approx(expected, rel=1e-6), way
        assert losses[8] != losses[0]


def test_it_is_once_and_no_best_epoch(run_tiny, tmp_path):
    """A run that goes on does not repeat it; an epoch not validated is not best by its value."""
    every_second = ("trainer.check_val_every_n_epoch=2", "callbacks.model_checkpoint={mode: min}")
    options = (*ON, *every_second, "callbacks.model_checkpoint.monitor=val/loss")
    run_tiny(tmp_path, *options, "trainer.max_steps=11")
    run_tiny(tmp_path, *options, "resume=auto")
    assert list(values(tmp_path, "val")) == [0, 16]
    assert (tmp_path / "checkpoints/best").read_text().strip() == "step-00000016"
