"""Whole runs: what they leave on disk, what they return, and that the ways to run agree."""

from __future__ import annotations

import csv
from pathlib import Path

import oneflow_accel

import numpy as np
import pytest
from omegaconf import OmegaConf

from flow_train.data.datamodule import ImageDataModule
from flow_train.optim import build_loss, build_optimizer
from flow_train.steps.eager import EagerStep
from flow_train.task import ImageTask
from monarch_flow.engine.build import build_model
from monarch_flow.engine.run import run
from tests.launch import run_distributed
from tests.monarch_flow.engine.engine_runs import (
    config,
    last_checkpoint,
    values,
)


def test_it_learns_and_leaves_metrics_curves_and_checkpoints(run_tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOW_TRAIN_CURVES", "on")
    extras = ("logger.csv={}", "callbacks.params_log={}", "callbacks.macs={}")
    extras += ("callbacks.speed_monitor={}", "callbacks.learning_rate_monitor={}")
    metrics = run_tiny(tmp_path, "trainer.max_epochs=12", *extras, scheduler={"name": "constant"})
    losses = values(tmp_path)
    assert list(losses) == list(range(1, 97))
    assert np.mean(list(losses.values())[-4:]) < 0.8 * np.mean(list(losses.values())[:4])
    assert metrics["test/acc"] > 60
    assert metrics["best/val/acc"] == max(values(tmp_path, "val", "acc1").values())
    assert {"train/loss", "train/acc", "val/loss", "val/acctop5", "test/loss"} <= metrics.keys()
    assert sorted(values(tmp_path, "val")) == list(range(8, 97, 8))
    assert metrics["test/loss"] == values(tmp_path, "test")[96]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert (tmp_path / "checkpoints/latest").read_text().strip() == "step-00000096"
    assert (tmp_path / "checkpoints" / (tmp_path / "checkpoints/best").read_text().strip()).is_dir()
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {int(r["step"]): float(r["loss"]) for r in rows if r["split"] == "train"} == losses
    counts = values(tmp_path, "model", "params_total")
    model = last_checkpoint(tmp_path).model
    assert counts == {0: sum(array.size for array in model.values())}
    assert values(tmp_path, "model", "gmacs")[0] > 0
    assert set(values(tmp_path, "train", "time/intra_step (ms)")) == set(losses)
    assert set(values(tmp_path, "train", "lr-AdamW/pg2")) == set(losses)
    # Not known for the first step of an epoch.
    assert 9 not in values(tmp_path, "train", "time/inter_step (ms)")


def test_learning_rate_follows_the_schedule(run_tiny, tmp_path):
    """timm's cosine (spec 4.6): constant in an epoch; the phase counts from epoch 0."""
    run_tiny(tmp_path, "trainer.max_epochs=4", "test_after_training=false")
    rates = values(tmp_path, name="lr")
    expected = [
        1e-3,
        *(1e-5 + 0.5 * (3e-3 - 1e-5) * (1 + np.cos(np.pi * e / 4)) for e in (1, 2, 3)),
    ]
    np.testing.assert_allclose([rates[8 * e + 1] for e in range(4)], expected, rtol=1e-12)
    assert all(rates[8 * e + 1] == rates[8 * e + 8] for e in range(4))


def test_schedule_per_step(run_tiny, tmp_path):
    limits = ("trainer.max_steps=10", "test_after_training=false")
    schedule = {"name": "linear", "t_total": 10, "warmup_t": 4, "warmup_lr_init": 0.0}
    run_tiny(
        tmp_path, "train.scheduler_interval=step", "optimizer.lr=0.004", *limits, scheduler=schedule
    )
    rates = list(values(tmp_path, name="lr").values())
    expected = [0, 0.001, 0.002, 0.003, *(0.004 * (10 - t) / 6 for t in range(4, 10))]
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)


def test_accumulation_equals_a_larger_batch(run_tiny, tmp_path):
    """16 images at once, or twice 8, and the last step of the epoch from fewer batches."""
    common = ("test_after_training=false", "trainer.gradient_clip_val=0.5")
    run_tiny(tmp_path / "once", *common)
    halves = ("datamodule.batch_size=8", "trainer.accumulate_grad_batches=2")
    run_tiny(tmp_path / "twice", *common, *halves)
    once, twice = values(tmp_path / "once"), values(tmp_path / "twice")
    assert once.keys() == twice.keys()
    np.testing.assert_allclose(list(twice.values()), list(once.values()), rtol=1e-5)
    parts = ("datamodule.batch_size=8", "trainer.accumulate_grad_batches=3")
    run_tiny(tmp_path / "thirds", *common, *parts, "trainer.max_epochs=1")
    # 16 batches: five times three, and one.
    assert list(values(tmp_path / "thirds")) == [1, 2, 3, 4, 5, 6]


def test_evaluation_of_a_checkpoint(run_tiny, tmp_path):
    """The same figures as in training; callbacks that are null are no obstacle."""
    metrics = run_tiny(tmp_path, "trainer.max_epochs=1", "callbacks.ema={decay: 0.9}")
    options = ("callbacks.ema=null", "callbacks.model_checkpoint=null")
    found = run_tiny(tmp_path / "x", f"eval.ckpt={tmp_path / 'checkpoints'}", *options)
    assert found == {name: metrics[name] for name in found}
    assert set(found) == {f"{s}/{m}" for s in ("val", "test") for m in ("loss", "acc", "acctop5")}
    # The averages are what is validated, and not the weights.
    last = run_tiny(tmp_path / "x", f"eval.ckpt={tmp_path}", "eval.use_ema=false", *options)
    assert abs(last["val/loss"] - metrics["val/loss"]) > 1e-4
    only = run_tiny(tmp_path / "x", f"eval.ckpt={tmp_path}", "eval.run_val=false")
    assert set(only) == {"test/loss", "test/acc", "test/acctop5"}
    assert not (tmp_path / "x").exists()


def test_trial_run_writes_nothing(run_tiny, tmp_path):
    metrics = run_tiny(tmp_path / "out", "trainer.fast_dev_run=2")
    assert {"train/loss", "val/acc"} <= metrics.keys()
    assert not (tmp_path / "out").exists()


def test_a_profile_leaves_its_trace_alone(run_tiny, tmp_path, caplog):
    with caplog.at_level("INFO", logger="oneflow_accel"):
        run_tiny(tmp_path, "trainer.profile=1", "train.sparse_to_dense.fraction=0.5")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert "a step takes" in caplog.text
    assert "MonarchLinear" in caplog.text


@pytest.mark.parametrize("limit", ["3", "0.4"])
def test_limits_do_not_depend_on_what_a_step_is_made_of(run_tiny, tmp_path, limit, monkeypatch):
    """A global batch of one batch or four: the same steps, and validation images of all classes."""
    seen = []

    def counted(task, model, loader, *args, **kwargs):
        labels = np.concatenate([batch.labels for batch in loader])
        seen.append(sorted(labels.tolist()))
        return evaluate(task, model, loader, *args, **kwargs)

    evaluate = ImageTask.evaluate
    monkeypatch.setattr(ImageTask, "evaluate", counted)
    limits = (f"trainer.limit_train_batches={limit}", f"trainer.limit_val_batches={limit}")
    for name, batches in (("one", 1), ("four", 4)):
        made_of = (
            f"datamodule.batch_size={16 // batches}",
            f"datamodule.batch_size_eval={32 // batches}",
            f"trainer.accumulate_grad_batches={batches}",
        )
        run_tiny(tmp_path / name, *limits, *made_of, "test_after_training=false")
    one, four = values(tmp_path / "one"), values(tmp_path / "four")
    assert list(one) == list(range(1, 7))
    assert one == pytest.approx(four, rel=1e-5)
    assert seen[0] == seen[2]
    assert len(seen[0]) == (48 if limit == "3" else 25)
    _, counts = np.unique(seen[0], return_counts=True)
    assert len(counts) == 10
    assert counts.max() - counts.min() <= 2


def test_best_checkpoints_are_kept(run_tiny, tmp_path):
    """save_top_k of the best by val/loss, and the two newest."""
    keep = "callbacks.model_checkpoint={monitor: val/loss, mode: min, save_top_k: 2}"
    run_tiny(tmp_path, "trainer.max_epochs=6", "optimizer.lr=0.02", keep)
    by_loss = sorted((loss, step) for step, loss in values(tmp_path, "val").items())
    expected = {step for _, step in by_loss[:2]} | {40, 48}
    folders = {int(f.name.removeprefix("step-")) for f in (tmp_path / "checkpoints").glob("step-*")}
    assert folders == expected
    best = (tmp_path / "checkpoints/best").read_text().strip()
    assert best == f"step-{by_loss[0][1]:08d}"


def test_early_stopping(run_tiny, tmp_path):
    """With a learning rate of 0 no validation is better than the first."""
    stop = ("callbacks.early_stopping={patience: 2}", "trainer.min_epochs=5")
    frozen = ("optimizer.lr=0.0", "scheduler.lr_min=0.0", "scheduler.warmup_lr_init=0.0")
    few = ("trainer.max_epochs=9", "trainer.limit_train_batches=1")
    run_tiny(tmp_path, *few, *stop, *frozen)
    assert sorted(values(tmp_path, "val")) == [1, 2, 3, 4, 5]


def test_no_validation_where_it_has_no_batches(run_tiny, tmp_path):
    """Before the first step neither."""
    options = ("trainer.limit_val_batches=0", "callbacks.initial_validation={}")
    metrics = run_tiny(tmp_path, *options, "trainer.max_epochs=1")
    assert {name.partition("/")[0] for name in metrics} == {"train"}
    assert not values(tmp_path, "val")


def test_norm_monitor_against_numpy(run_tiny, tmp_path):
    run_tiny(
        tmp_path, "callbacks.norm_monitor={}", "trainer.max_steps=8", "test_after_training=false"
    )
    # The step's gradients are not kept; the weights before the second step are known from the
    # moments: AdamW's first average after the first step is 0.1 times its gradient.
    other = tmp_path / "one"
    run_tiny(other, "trainer.max_steps=1", "test_after_training=false")
    checkpoint = last_checkpoint(other)
    gradients = {
        name.removeprefix("exp_avg/"): array.astype(np.float64) / 0.1
        for name, array in checkpoint.optimizer.items()
        if name.startswith("exp_avg/")
    }
    total = sum(np.abs(gradient).sum() for gradient in gradients.values())
    logged = values(tmp_path, "train", "total_grad_l1_norm")
    assert logged[1] == pytest.approx(total, rel=1e-4)
    name = "blocks.0.mlp.fc1.blkdiag1"
    largest = values(tmp_path, "train", f"stats/{name}_grad_max")[1]
    assert largest == pytest.approx(np.abs(gradients[name]).max(), rel=1e-4)
    weights = sum(np.abs(a.astype(np.float64)).sum() for a in checkpoint.model.values())
    assert values(tmp_path, "train", "total_param_l1_norm")[2] == pytest.approx(weights, rel=1e-5)


def test_two_processes_equal_one(digits, tmp_path):
    """20 steps on the same global batch: accumulation, clipping, EMA, norms of gradients, a switch
    to dense layers in the middle, validation, test. Under nn.Graph: test_engine_mode_cycle.py."""
    common = (
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=1.0",
        "trainer.limit_train_batches=5",
        "trainer.max_epochs=4",
        "train.sparse_to_dense.fraction=0.5",
        "callbacks.ema={decay: 0.9}",
        "callbacks.speed_monitor={}",
        "callbacks.norm_monitor={}",
    )
    one, two = tmp_path / "one", tmp_path / "two"
    run(config(digits, one, *common, "datamodule.batch_size=8"))
    path = tmp_path / "two.yaml"
    OmegaConf.save(config(digits, two, *common, "datamodule.batch_size=4"), path)
    result = run_distributed([Path(__file__).parent / "engine_runs.py", path], 2)
    assert result.returncode == 0, result.stdout
    assert len(values(two)) == 20
    figures = [("train", "loss"), ("val", "loss"), ("test", "loss"), ("test", "acc1")]
    for split, name in (*figures, ("train", "total_grad_l1_norm")):
        ours, theirs = values(two, split, name), values(one, split, name)
        assert ours.keys() == theirs.keys()
        rtol = 1e-3 if "norm" in name else 1e-5
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)
    assert len(last_checkpoint(two).state["rng"]) == 2


def test_command_line(digits, tmp_path, caplog):
    """An experiment of ours as a user starts it; a second start goes on where it was."""
    from monarch_flow.train import main

    args = ["experiment=mnist/vit-monarch-s2d", f"datamodule.data_dir={digits}", "name=tiny"]
    args += [f"work_dir={tmp_path}", "datamodule.val_split=64", "datamodule.num_workers=0"]
    args += ["train.global_batch_size=32", "model.embed_dim=32", "model.depth=2", "seed=1"]
    args += ["train.sparse_to_dense.fraction=0.5", "logger=csv", "callbacks.ema={decay: 0.5}"]
    assert main([*args, "trainer.max_epochs=2", "trainer.max_steps=3"]) == 0
    assert main([*args, "trainer.max_epochs=2", "resume=auto"]) == 0
    out = tmp_path / "tiny"
    assert list(values(out)) == [3, 4, 8]
    assert values(out, "switch", "loss_after")[4] > 0
    for name in ("config.yaml", "config_tree.txt", "metrics.csv"):
        assert (out / name).stat().st_size > 0
    assert main([*args, "trainer.max_epochs=2", "resume=auto"]) == 0
    assert "nothing left to train: step 8 is done" in caplog.text
    assert main([*args, f"eval.ckpt={out}/checkpoints"]) == 0


class _ClaimsAmp:
    """The CPU, saying that it has mixed precision; oneflow's autocast does nothing there."""

    def __init__(self, backend) -> None:
        self._backend = backend

    def supports(self, feature: str) -> bool:
        return True

    def __getattr__(self, name: str):
        return getattr(self._backend, name)


def test_scaled_loss_trains_like_an_unscaled_one(digits, tmp_path):
    """Scaling by 2^16 changes no digit; where gradients overflow the step is left out."""
    backend = oneflow_accel.select_device()
    cfg = config(digits, tmp_path)
    data = ImageDataModule(
        data_dir=digits, dataset="mnist", image_size=28, batch_size=8, val_split=8
    )
    task = ImageTask(build_loss(None))
    batches = [task.arrays(batch) for batch in list(data.train_loader)[:4]]
    losses, steps = [], []
    for precision, device in (("float32", backend), ("float16", _ClaimsAmp(backend))):
        backend.manual_seed(0)
        model = build_model(cfg, data)[1].to(backend.device())
        optimizer = build_optimizer(model, {"name": "adamw", "lr": 1e-3})
        settings = {"clip": 1.0, "precision": precision}
        steps.append(EagerStep(model, device, optimizer, task, **settings))
        losses.append([float(steps[-1].step(b, lr=1e-3).loss.numpy()) for b in batches])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    scaled = steps[1]
    before = {name: value.numpy() for name, value in scaled.model.state_dict().items()}
    scaled.load_state({"loss_scale": {"scale": 1e40, "good_steps": 0}})
    scaled.step(batches[0], lr=1e-3)
    assert scaled.state()["loss_scale"]["scale"] == pytest.approx(5e39)
    for name, value in scaled.model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name])
