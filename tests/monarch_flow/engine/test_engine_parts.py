"""Parts of the engine by themselves."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from omegaconf import OmegaConf

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager
from flow_train.hooks import Monitored, build_hooks
from flow_train.metrics.log import RunLog
from flow_train.optim import build_schedule
from flow_train.options import Calendar, Position, limited, read_trainer_options
from flow_train.rng import step_seed
from flow_train.steps.eager import LossScaler
from monarch_flow.engine.sparse_to_dense import SparseToDense


def _options(**trainer):
    train = {"scheduler_interval": trainer.pop("interval", "epoch")}
    return read_trainer_options(
        OmegaConf.create({"trainer": {"max_epochs": 10, **trainer}, "train": train})
    )


@pytest.mark.parametrize(
    ("limit", "left"), [(None, 10), (3, 3), (30, 10), (0.25, 2), (1.0, 10), (0.01, 1), (0, 0)]
)
def test_limits(limit, left):
    assert limited(10, limit) == left


@pytest.mark.parametrize("limit", [-1, 1.5, -0.5])
def test_limits_that_are_none(limit):
    with pytest.raises(UserError, match=r"trainer\.limit_val_batches"):
        _options(limit_val_batches=limit)


@pytest.mark.parametrize(
    ("epochs", "fraction", "switch"),
    [(30, 0.7, 21), (10, 0.7, 7), (3, 0.7, 3), (10, 0.0, 0), (10, 1.0, 10), (310, 0.7, 217)],
)
def test_switch_epoch(epochs, fraction, switch):
    calendar = Calendar(_options(max_epochs=epochs), 5, lambda t: t)
    assert SparseToDense(fraction).epoch(calendar) == switch


def test_calendar_of_partial_windows():
    """10 batches, 4 per step: 3 steps an epoch, the last of 2 batches."""
    calendar = Calendar(_options(max_epochs=4, accumulate_grad_batches=4), 10, lambda t: t)
    assert calendar.steps_per_epoch == 3
    assert calendar.last_step(Position()) == 12
    assert calendar.last_step(Position(1, 8, 5)) == 12
    assert calendar.last_step(Position(1, 10, 6)) == 12
    assert calendar.last_step(Position(4, 0, 12)) == 12
    rates = [calendar.learning_rate(step, Position(1, 4, 4)) for step in range(4, 12)]
    assert rates == [1, 1, 2, 2, 2, 3, 3, 3]


def test_calendar_counts_steps_for_a_schedule_by_step():
    calendar = Calendar(_options(interval="step", max_steps=7), 5, lambda t: t)
    assert calendar.last_step(Position()) == 7
    assert calendar.learning_rate(6, Position(1, 0, 5)) == 6


def test_compiled_schedule_is_the_schedule():
    """Evaluated as the graph's kernel does: the first boundary that is not below the step."""
    from flow_train.steps.graph import CompiledSchedule

    schedule = build_schedule(
        {"t_initial": 5, "lr_min": 1e-5, "warmup_t": 2, "warmup_lr_init": 1e-4}, 1e-3
    )
    calendar = Calendar(_options(max_epochs=7), 3, schedule)
    optimizer = flow.optim.AdamW([flow.nn.Parameter(flow.zeros(1))], lr=1.0)
    table = CompiledSchedule(
        optimizer, lambda step: calendar.learning_rate(step, Position()), calendar.epochs * 3
    )
    for step in range(25):
        piece = sum(boundary < step for boundary in table.boundaries)
        assert table.rates[piece] == schedule(min(step // 3, 6))


def test_loss_scaler_halves_and_doubles():
    scaler = LossScaler(scale=8.0, growth_interval=2)
    parameter = flow.nn.Parameter(flow.zeros(3))

    def gradient(values):
        parameter.grad = None
        (parameter * flow.tensor(values)).sum().backward()
        return scaler.unscale([parameter])

    assert gradient([8.0, 16.0, -8.0])
    np.testing.assert_array_equal(parameter.grad.numpy(), [1, 2, -1])
    assert not gradient([1.0, float("inf"), 0.0])
    assert scaler.scale == 4.0
    assert gradient([1.0, 1.0, 1.0])
    assert gradient([1.0, 1.0, 1.0])
    assert scaler.scale == 8.0
    other = LossScaler()
    other.load_state(scaler.state())
    assert other.scale == 8.0


def test_step_seeds_differ():
    seeds = {step_seed(s, t, r) for s in range(3) for t in range(3) for r in range(3)}
    assert len(seeds) == 27
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3) < 2**63


def test_checkpoints_of_named_steps_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in range(1, 6):
        manager.save(Checkpoint({}), step=step, keep=(2,) if step >= 2 else ())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000002",
        "step-00000005",
    ]


def test_monitored_metric():
    lower = Monitored("val/loss", "min", "key")
    assert lower.better(1.0, 2.0)
    assert not lower.better(1.0, 1.5, by=0.6)
    assert lower.value({"val/loss": float("nan")}) == float("inf")
    assert Monitored("val/acc1", "max", "key").value({"val/acc": 3.0}) == 3.0
    with pytest.raises(UserError, match="mode='least': it must be max or min"):
        build_hooks({"early_stopping": {"mode": "least"}})


def test_callbacks_that_are_null_are_left_out():
    built = build_hooks({"model_checkpoint": {}, "ema": {"decay": 0.5}, "macs": None})
    assert list(built) == ["ema", "model_checkpoint"]
    with pytest.raises(UserError, match=r"callbacks\.ema\.decay"):
        build_hooks({"ema": {}})
    with pytest.raises(
        UserError, match=r"patients; did you mean callbacks\.early_stopping\.patience"
    ):
        build_hooks({"early_stopping": {"patients": 3}})


def _log_with_wandb(tmp_path):
    log = RunLog(
        tmp_path, {"wandb": {"project": "p", "id": None}}, run_name="r", config={}, enabled=True
    )
    log.log(3, {"loss": 1.5})
    log.close()


def test_wandb_gets_the_metrics_offline(tmp_path, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    _log_with_wandb(tmp_path)
    given = wandb.init.call_args.kwargs
    assert (given["mode"], given["project"]) == ("offline", "p")
    run = wandb.init.return_value
    run.log.assert_called_once_with({"train/loss": 1.5, "step": 3}, step=3)
    run.finish.assert_called_once_with()


def test_wandb_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    wandb = MagicMock()
    wandb.init.side_effect = ConnectionError("no network")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    _log_with_wandb(tmp_path)
    assert "no network" in caplog.text


def test_wandb_that_is_not_installed_is_an_error(run_tiny, tmp_path, monkeypatch):
    """On every process, and before anything is written; in a trial, too."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    for more in ((), ("trainer.fast_dev_run=1",)):
        with pytest.raises(UserError, match=r"wandb is not installed; pip install wandb, or leave"):
            run_tiny(tmp_path / "run", *more, logger={"wandb": {"project": "p"}})
    assert not (tmp_path / "run").exists()


def test_unknown_logger(tmp_path):
    with pytest.raises(UserError, match="tensorboard"):
        RunLog(tmp_path, {"comet": {}}, run_name="r", config={}, enabled=True)
