"""What a session refuses, and says when it is interrupted. What runs resume and keep is in the
trainers' tests."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.data.arrays import ArrayLoader
from flow_train.session import Data, Identity, ImageTask, Recipe, Session, TrainerOptions

IMAGES = np.zeros((8, 1, 2, 2), np.float32)
ARRAYS = {"images": IMAGES, "labels": np.arange(8) % 2}


def train(folder: Path, name: str = "linear", *, start_epoch: int = 0, **options: object) -> int:
    """The number of steps that are done."""
    data = Data(*(ArrayLoader(ARRAYS, 4, train=train) for train in (True, False)))
    settings = TrainerOptions(**{"max_epochs": 1, **options})
    recipe = Recipe(lambda m: flow.optim.SGD(m.parameters(), lr=0.1), lambda epoch: 0.1, settings)
    with Session(folder, Identity(name), "auto") as run:
        model = run.load(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        trainer = run.fit(model, ImageTask(), data, recipe, start_epoch=start_epoch)
    return trainer.position.step


def test_goes_on_and_draws_curves(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLOW_TRAIN_CURVES", "on")
    assert train(tmp_path) == 2
    assert train(tmp_path, max_epochs=2) == 4
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    train(tmp_path)
    with pytest.raises(CheckpointError, match="is of 'linear', and the model is 'other'"):
        train(tmp_path, "other")


def test_a_run_without_steps_is_refused_and_leaves_nothing(tmp_path) -> None:
    with pytest.raises(UserError, match="an epoch has no step"):
        train(tmp_path / "limited", limit_train=0)
    with pytest.raises(UserError, match="epoch 3 is step 6, and the run ends at step 6"):
        train(tmp_path / "late", start_epoch=3)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_says_how_to_go_on(tmp_path) -> None:
    train(tmp_path)
    words = "step-00000002: continue with resume=auto"
    with (
        pytest.raises(KeyboardInterrupt, match=words),
        Session(tmp_path, Identity("linear"), "auto"),
    ):
        raise KeyboardInterrupt
