"""resume=FILE.pth.tar: going on with a run that timm's or ViTAE's training script saved."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import oneflow_accel
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import pytest

from flow_train.optim import ExponentialMovingAverage, build_loss, build_optimizer
from flow_train.steps.eager import EagerStep
from flow_train.task import ImageTask
from monarch_flow.engine.build import build_data, build_model
from monarch_flow.engine.other_run import read_other_run
from monarch_flow.engine.weights import load_model
from monarch_flow.models import create_model
from tests.launch import REPOSITORY
from tests.monarch_flow.engine.engine_runs import config, last_checkpoint, values
from tests.monarch_flow.engine.test_vitae_sparse_to_dense import TINY
from tests.torch_writer import save_torch_file

# Nothing random but the order of the images, which follows from the seed.
VITAE = {**TINY, "drop_path_rate": 0.0, "mlp_cfg": None}
TWO = ("trainer.max_epochs=2", "test_after_training=false", "callbacks.ema={decay: 0.9}")


def as_timm_saves(run_dir: Path, model, path: Path, *, tokens: bool = True, **more) -> Path:
    """The newest checkpoint as timm's CheckpointSaver has it: parameters by number, those without
    decay first, in the order of the modules; `tokens` are among these in ViTs, not in ViTAE.
    """
    checkpoint = last_checkpoint(run_dir)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    groups: list[list[str]] = [[], []]
    for name, value in trained.items():
        without = value.ndim <= 1 or name.endswith(".bias")
        without |= tokens and name in ("cls_token", "pos_embed")
        groups[0 if without else 1].append(name)
    state, param_groups, number = {}, [], 0
    for names, decay in zip(groups, (0.0, 0.05), strict=True):
        param_groups.append({"weight_decay": decay, "betas": (0.9, 0.999), "params": []})
        for name in names:
            moments = {
                key: checkpoint.optimizer[f"{key}/{name}"] for key in ("exp_avg", "exp_avg_sq")
            }
            state[number] = {"step": checkpoint.state["step"], **moments}
            param_groups[-1]["params"].append(number)
            number += 1
    weights = {name: checkpoint.model[name] for name in model.state_dict()}
    averages = {name: checkpoint.optimizer.get(f"ema/{name}", weights[name]) for name in weights}
    content = {
        "epoch": checkpoint.state["epoch"] - 1,
        "arch": "ViTAE_basic_Tiny",
        # As a run of several processes has it.
        "state_dict": {f"module.{name}": array for name, array in weights.items()},
        "optimizer": {"state": state, "param_groups": param_groups},
        "version": 2,
        "args": argparse.Namespace(seed=3),
        "state_dict_ema": averages,
        "metric": 12.5,
    }
    return save_torch_file(path, {**content, **more})


@pytest.fixture(scope="module")
def model_of(digits):
    def build(tmp_path, **groups):
        cfg = config(digits, tmp_path, **groups)
        return build_model(cfg, build_data(cfg, 0))[1]

    return build


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        pytest.param({}, True, id="vit-monarch"),
        pytest.param({"model": VITAE}, False, id="vitae"),
    ],
)
def test_goes_on_as_if_the_run_had_not_ended(run_tiny, tmp_path, model_of, groups, tokens, caplog):
    """Weights, moments, steps, epoch and averages: the second epoch is that of a whole run."""
    run_tiny(tmp_path / "whole", *TWO, **groups)
    run_tiny(tmp_path / "half", *TWO, "trainer.max_steps=8", **groups)
    model = model_of(tmp_path, **groups)
    path = as_timm_saves(tmp_path / "half", model, tmp_path / "last.pth.tar", tokens=tokens)
    caplog.set_level("INFO", "oneflow_accel")
    run_tiny(tmp_path / "rest", *TWO, f"resume={path}", **groups)
    assert "last.pth.tar: epoch 1, 8 steps of the optimizer, moving averages" in caplog.text
    whole, rest = values(tmp_path / "whole"), values(tmp_path / "rest")
    assert list(rest) == list(range(9, 17))
    assert rest == pytest.approx({step: whole[step] for step in rest}, rel=1e-5)
    for kind in ("model", "optimizer"):
        wanted = getattr(last_checkpoint(tmp_path / "whole"), kind)
        found = getattr(last_checkpoint(tmp_path / "rest"), kind)
        assert found.keys() == wanted.keys()
        for name, array in found.items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_goes_on_as_torch_does():
    """From a file of timm's (golden/make_timm_run.py): torch's next losses, weights, averages."""
    golden = json.loads((REPOSITORY / "tests/golden/timm_run.json").read_text())
    run = read_other_run(str(REPOSITORY / "tests/data/torch_checkpoints/timm_run.pth.tar"))
    sizes = {"patch_size": 7, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
    model = create_model("vit_tiny_patch4_28", **sizes, norm_eps=1e-6)
    checkpoint = run.checkpoint(model, "vit", 10, seed=1, images=8)
    assert (run.seed, checkpoint.state["epoch"], checkpoint.state["step"]) == (5, 1, 3)
    load_model(model, checkpoint, "vit", 10, switches=False)
    backend = oneflow_accel.select_device()
    model = model.to(backend.device())
    optimizer = build_optimizer(model, {"name": "adamw", "lr": 1e-2, "weight_decay": 0.05})
    step = EagerStep(model, backend, optimizer, ImageTask(build_loss(None)))
    step.load_optimizer(checkpoint.optimizer, 3)
    average = ExponentialMovingAverage(model, 0.9)
    average.load(checkpoint.optimizer, checkpoint.state["callbacks"]["ema"])
    losses = []
    for number in range(3, 7):
        random = np.random.default_rng(number)
        images = random.standard_normal((8, 1, 28, 28)).astype(np.float32)
        batch = {"images": images, "labels": random.integers(0, 10, 8)}
        figures = step.step(batch, 1e-2)
        average.update(model)
        losses.append(float(figures.loss.numpy()))
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-5)
    np.testing.assert_allclose(model.head.bias.numpy(), golden["head.bias"], atol=1e-5)
    found = average.shadow["head.bias"].numpy()
    np.testing.assert_allclose(found, golden["ema/head.bias"], atol=1e-5)


def test_what_no_run_can_go_on_with(run_tiny, tmp_path, model_of):
    run_tiny(tmp_path / "run", *TWO, "trainer.max_steps=1", "trainer.max_epochs=1")
    model = model_of(tmp_path)
    whole = as_timm_saves(tmp_path / "run", model, tmp_path / "a.pth.tar")
    empty = as_timm_saves(
        tmp_path / "run", model, tmp_path / "b.pth.tar", optimizer={"state": {}, "param_groups": []}
    )
    one = {"state": {0: {"step": 1, "exp_avg": np.zeros(3, np.float32)}}}
    other = as_timm_saves(
        tmp_path / "run",
        model,
        tmp_path / "c.pth.tar",
        optimizer={**one, "param_groups": [{"params": [0]}]},
    )
    strange = [
        as_timm_saves(tmp_path / "run", model, tmp_path / f"s{number}.pth.tar", optimizer=optimizer)
        for number, optimizer in enumerate(
            (
                {"state": [1], "param_groups": [{"params": [0]}]},
                {"state": {}, "param_groups": [{}]},
                {"state": {0: {"step": "x", **one["state"][0]}}, "param_groups": [{"params": 5}]},
            )
        )
    ]
    (tmp_path / "d.pth.tar").write_bytes(whole.read_bytes()[:5000])
    for options, text in (
        ((f"resume={empty}",), "its optimizer has no state"),
        ((f"resume={other}",), r"1 parameters in 1 groups, .*train\.init_from\.path=\S+tar$"),
        *(((f"resume={path}",), "not as timm's or ViTAE's script writes it") for path in strange),
        ((f"resume={tmp_path / 'd.pth.tar'}",), "cannot be read: truncated"),
        ((f"resume={whole}", "model.depth=3"), "missing"),
        ((f"resume={whole}", "optimizer={name: sgd, momentum: 0.9}"), "adamw"),
    ):
        with pytest.raises(CheckpointError, match=text):
            run_tiny(tmp_path / "out", *TWO, *options)
    # A folder with a run is not this run's.
    with pytest.raises(CheckpointError, match="already holds a run"):
        run_tiny(tmp_path / "run", *TWO, f"resume={whole}")


def test_a_trial_does_not_drop_what_was_to_be_resumed(run_tiny, tmp_path):
    with pytest.raises(UserError, match=r"resume=.*trial \(trainer.fast_dev_run\) begins afresh"):
        run_tiny(tmp_path / "out", "trainer.fast_dev_run=1", "resume=run/last.pth.tar")
