"""A task other than images: a bigram model of tokens, against NumPy in float64, in every way of
making a step, evaluated and stopped within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel.errors import DataError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.checkpoint.folders import agreed_checkpoint
from flow_train.config import keys
from flow_train.data.arrays import ArrayLoader
from flow_train.hooks import EarlyStopping, Hook, ModelCheckpoint
from flow_train.loop import Data, RunIdentity, Trainer
from flow_train.metrics.log import read_metrics
from flow_train.options import TrainerOptions
from flow_train.session import Recipe, Session
from flow_train.task import IGNORED, TokenTask

WORDS, LENGTH, ROWS, LR = 5, 4, 24, 0.5


def arrays() -> dict[str, np.ndarray]:
    """Sentences in which each word is followed by the next one, in the order of their numbers."""
    first = np.random.default_rng(0).integers(WORDS, size=(ROWS, 1))
    words = (first + np.arange(LENGTH + 1)) % WORDS
    labels = words[:, 1:].copy()
    labels[::3, -1] = IGNORED
    return {"tokens": words[:, :-1], "labels": labels}


def make_model() -> nn.Module:
    model = nn.Embedding(WORDS, WORDS)
    model.weight.data.copy_(flow.tensor(np.eye(WORDS, dtype=np.float32)))
    return model.to(oneflow_accel.select_device().device())


def train(
    folder: Path, hooks: dict[str, Hook] | None = None, *, batch: int = 8, **options: Any
) -> Trainer:
    def sgd(model: nn.Module) -> flow.optim.Optimizer:
        return flow.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    settings = TrainerOptions(**{"max_epochs": 2, "log_every": 1, **options})
    data = Data(*(ArrayLoader(arrays(), batch, train=each) for each in (True, False)))
    recipe = Recipe(sgd, lambda epoch: LR, settings, hooks or {})
    with Session(folder, RunIdentity("words"), "auto", seed=0) as run:
        model = run.load(make_model())
        return run.fit(model, TokenTask(), data, recipe)


def expected(steps: int) -> list[float]:
    """Losses of steps of 8 sentences by the definition."""
    weight, velocity, losses = np.eye(WORDS), np.zeros((WORDS, WORDS)), []
    loader = ArrayLoader(arrays(), 8, train=True)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            tokens, labels = batch["tokens"].reshape(-1), batch["labels"].reshape(-1)
            tokens, labels = tokens[labels != IGNORED], labels[labels != IGNORED]
            scores = np.exp(weight[tokens])
            shares = scores / scores.sum(axis=1, keepdims=True)
            losses.append(-np.log(shares[np.arange(len(labels)), labels]).mean())
            shares[np.arange(len(labels)), labels] -= 1
            gradient = np.zeros_like(weight)
            np.add.at(gradient, tokens, shares / len(labels))
            velocity = 0.9 * velocity + gradient
            weight = weight - LR * velocity
    return losses[:steps]


def logged(folder: Path, split: str, name: str) -> dict[int, float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["values"][name] for line in lines if line["split"] == split}


@pytest.mark.parametrize("way", [{}, {"graph": True}, {"batch": 4, "accumulate": 2}], ids=str)
def test_losses_and_perplexities_are_those_of_the_definition(way, tmp_path) -> None:
    """A part of a batch weighs as much as it has labels."""
    trainer = train(tmp_path, **way)
    for name, wanted in (("loss", expected(6)), ("perplexity", np.exp(expected(6)))):
        assert list(logged(tmp_path, "train", name).values()) == pytest.approx(wanted, rel=1e-5)
    # Of 8 sentences of 4 labels, two or three lack the last.
    assert logged(tmp_path, "train", "tokens_per_second")[1] > 0
    assert trainer.metrics["val/perplexity"] < trainer.metrics["train/perplexity"]


def test_a_run_of_iterations_is_evaluated_kept_and_stopped_within_an_epoch(tmp_path) -> None:
    """Three steps an epoch, an evaluation every two; 'better' is by more than the loss can fall."""
    stopping = {"monitor": "val/loss", "mode": "min", "patience": 2, "min_delta": 10.0}
    keeping = {"monitor": "val/perplexity", "mode": "min", "save_last": False}
    hooks: dict[str, Hook] = {
        "early_stopping": EarlyStopping(keys.EarlyStopping(**stopping)),
        "model_checkpoint": ModelCheckpoint(keys.ModelCheckpoint(**keeping)),
    }
    limits = {"max_epochs": None, "max_steps": 100, "val_every_steps": 2}
    trainer = train(tmp_path, hooks, **limits)
    assert sorted(logged(tmp_path, "val", "loss")) == [2, 4, 6]
    assert (trainer.position.step, trainer.should_stop) == (6, True)
    best = agreed_checkpoint(str(tmp_path / "checkpoints" / "best"), tmp_path)
    assert best is not None
    assert best.state["step"] == 6


def test_a_run_goes_on_from_within_an_epoch(tmp_path) -> None:
    """To the last bit."""
    limits = {"max_epochs": None, "val_every_steps": 2}
    train(tmp_path / "whole", max_steps=8, **limits)
    for steps in (4, 8):
        settings = keys.ModelCheckpoint(monitor="val/loss", mode="min")
        hooks: dict[str, Hook] = {"model_checkpoint": ModelCheckpoint(settings)}
        train(tmp_path / "parts", hooks, max_steps=steps, **limits)
    for split in ("train", "val"):
        whole, parts = (logged(tmp_path / each, split, "loss") for each in ("whole", "parts"))
        assert parts == whole
        assert len(whole) == {"train": 8, "val": 4}[split]


def test_an_evaluation_of_nothing_is_said() -> None:
    with pytest.raises(DataError, match="no tokens to evaluate"):
        TokenTask().evaluate(make_model(), [], oneflow_accel.select_device())
