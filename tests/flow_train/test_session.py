"""What a session refuses, and says when it is interrupted. What runs resume and keep is in the
trainers' tests."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel import distributed
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.data.arrays import ArrayLoader
from flow_train.metrics.log import read_metrics
from flow_train.session import (
    Data,
    ImageTask,
    Recipe,
    RunIdentity,
    Session,
    TokenTask,
    TrainerOptions,
)
from tests.launch import run_distributed

IMAGES = np.zeros((8, 1, 2, 2), np.float32)
ARRAYS = {"images": IMAGES, "labels": np.arange(8) % 2}


def train(folder: Path, name: str = "linear", *, start_epoch: int = 0, **options: object) -> int:
    """The number of steps that are done."""
    data = Data(*(ArrayLoader(ARRAYS, 4, train=train) for train in (True, False)))
    settings = TrainerOptions(**{"max_epochs": 1, **options})
    recipe = Recipe(lambda m: flow.optim.SGD(m.parameters(), lr=0.1), lambda epoch: 0.1, settings)
    with Session(folder, RunIdentity(name), "auto") as run:
        model = run.load(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        trainer = run.fit(model, ImageTask(), data, recipe, start=start_epoch)
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
        Session(tmp_path, RunIdentity("linear"), "auto"),
    ):
        raise KeyboardInterrupt


def train_on_tokens(folder: Path, *, graph: bool) -> None:
    """Six steps of 8 sentences, of all processes together, and an evaluation every four."""
    words = np.random.default_rng(0).integers(5, size=(24, 5))
    arrays = {"tokens": words[:, :-1], "labels": words[:, 1:]}
    size = 8 // distributed.world_size()
    data = Data(*(ArrayLoader(arrays, size, train=train) for train in (True, False)))
    options = TrainerOptions(max_steps=6, val_every_steps=4, log_every=1, graph=graph, clip=0.5)
    recipe = Recipe(lambda m: flow.optim.AdamW(m.parameters(), lr=0.1), lambda epoch: 0.1, options)
    with Session(folder, RunIdentity("words"), seed=1) as run:
        model = run.load(nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)))
        run.fit(model, TokenTask(), data, recipe)


PROGRAM = """
import math, sys
from pathlib import Path
from oneflow_accel import distributed
import oneflow as flow
from flow_train.metrics.log import NonFiniteLossError, StepWindow
from tests.flow_train.test_session import train_on_tokens
for way in ("eager", "graph"):
    train_on_tokens(Path(sys.argv[1], way), graph=way == "graph")
window = StepWindow()
window.add(3, loss=flow.tensor(math.nan if distributed.rank() == 1 else 1.0))
try:
    window.fetch(reduce=True)
except NonFiniteLossError as error:
    # In one piece, as two processes write.
    print(f"not finite at step {error.step}", flush=True)
"""


def test_two_processes_train_as_one(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_distributed([program, tmp_path], 2, timeout=200)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("not finite at step 3") == 2
    for way in ("eager", "graph"):
        train_on_tokens(tmp_path / "one" / way, graph=way == "graph")
        one, two = (
            read_metrics(folder / way / "metrics.jsonl") for folder in (tmp_path / "one", tmp_path)
        )
        assert [line["split"] for line in one].count("val") == 2
        for name in ("loss", "perplexity"):
            found, expected = ([line["values"].get(name) for line in lines] for lines in (two, one))
            assert found == pytest.approx(expected, rel=1e-5)
