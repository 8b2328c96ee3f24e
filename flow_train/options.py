"""How long a run trains and in which way; what a composed configuration says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf

PRECISIONS = ("32", "16", "bf16")


def as_plain(value: Any) -> Any:
    """A configuration node as plain dicts, lists and scalars, resolved."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def section(cfg: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A group of the configuration, empty where it is null or absent."""
    return dict(as_plain(cfg.get(key)) or {})


@dataclass(frozen=True)
class TrainerOptions:
    """How long and in which way a run trains.

    Attributes:
        max_epochs: None for no limit but `max_steps`.
        min_epochs: early stopping waits for these.
        max_steps: optimizer steps, None for no limit but `max_epochs`.
        accumulate: batches that one optimizer step takes.
        clip: largest norm of all gradients together, None for no clipping.
        precision: one of PRECISIONS.
        graph: train under nn.Graph.
        log_every: optimizer steps between two log lines.
        limit_train: optimizer steps per epoch: a number, a share of them (float), or None for all.
        limit_val: images of validation and test: a number of steps' images, a share, or None.
        check_val_every: epochs between two validations.
        fast_dev_run: batches of a trial run, 0 for a real one.
        per_step: the schedule's time is optimizer steps, and else epochs.
        way_on: what its user types to go on with a run that was told to stop.
        way_to_more: what its user types where all steps are done.
    """

    max_epochs: int | None = None
    min_epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip: float | None = None
    precision: str = "32"
    graph: bool = False
    log_every: int = 50
    limit_train: int | float | None = None
    limit_val: int | float | None = None
    check_val_every: int = 1
    fast_dev_run: int = 0
    per_step: bool = False
    way_on: str = "go on with resume=auto"
    way_to_more: str = (
        "ask for more trainer.max_epochs or trainer.max_steps, or give eval.ckpt to evaluate"
    )


def read_trainer_options(cfg: DictConfig) -> TrainerOptions:
    """The groups `trainer` and `train`.

    Raises:
        UserError: a value that no run can have; names its key.
    """
    trainer, train = section(cfg, "trainer"), section(cfg, "train")
    given: dict[str, Any] = {
        "max_epochs": _limit(trainer, "max_epochs"),
        "min_epochs": trainer.get("min_epochs"),
        "max_steps": _limit(trainer, "max_steps"),
        "accumulate": trainer.get("accumulate_grad_batches"),
        "clip": trainer.get("gradient_clip_val"),
        "precision": str(trainer.get("precision") or ""),
        "graph": bool(trainer.get("graph")),
        "log_every": trainer.get("log_every_n_steps"),
        "check_val_every": trainer.get("check_val_every_n_epoch"),
        "fast_dev_run": int(trainer.get("fast_dev_run") or 0),
        "per_step": train.get("scheduler_interval") == "step",
    }
    options = TrainerOptions(
        # Of these alone 0 is not the same as nothing.
        limit_train=trainer.get("limit_train_batches"),
        limit_val=trainer.get("limit_val_batches"),
        **{name: value for name, value in given.items() if value},
    )
    if options.precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision is {options.precision}; it can be {', '.join(PRECISIONS)}"
        )
    for key, count in (
        ("accumulate_grad_batches", options.accumulate),
        ("log_every_n_steps", options.log_every),
        ("check_val_every_n_epoch", options.check_val_every),
    ):
        if count < 1:
            raise UserError(f"trainer.{key} is {count}; it has to be 1 or more")
    interval = train.get("scheduler_interval", "epoch")
    if interval not in ("epoch", "step"):
        raise UserError(f"train.scheduler_interval is {interval!r}; it can be epoch or step")
    if options.max_epochs is None and options.max_steps is None and not options.fast_dev_run:
        raise UserError("the run has no end: set trainer.max_epochs or trainer.max_steps")
    return options


def limited(count: int, limit: int | float | None, key: str) -> int:
    """How many of `count` a limit leaves: at least 1, or 0 where it says 0.

    Raises:
        UserError: the limit is negative, or a share above 1.
    """
    if limit is None:
        return count
    if limit < 0 or (isinstance(limit, float) and limit > 1 and limit != int(limit)):
        raise UserError(f"{key} is {limit}; it is a number of global batches, or a share up to 1.0")
    if limit == 0:
        return 0
    if isinstance(limit, float) and limit <= 1:
        return max(1, math.floor(count * limit))
    return min(count, int(limit))


def _limit(trainer: Mapping[str, Any], key: str) -> int | None:
    """None and Lightning's -1 mean that there is no limit."""
    value = trainer.get(key)
    if value is None or value == -1:
        return None
    if value < 1:
        raise UserError(f"trainer.{key} is {value}; it has to be 1 or more, or null")
    return int(value)
