"""How long a run trains and in which way, as its configuration says; where it stands, and which
steps an epoch is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oneflow_accel.precision import canonical


def as_plain(value: Any) -> Any:
    """A configuration node as plain dicts, lists and scalars, resolved."""
    # Not at the top, as importing it takes 0.05 s; main.py has no such nodes.
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def section(cfg: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A group of the configuration, empty where it is null or absent."""
    return dict(as_plain(cfg.get(key)) or {})


@dataclass(frozen=True)
class TrainerOptions:
    """How long and in which way a run trains.

    Attributes:
        max_epochs, max_steps: None for no limit but the other one.
        min_epochs: early stopping waits for these.
        accumulate: batches that one optimizer step takes.
        clip: largest norm of all gradients together, None for no clipping.
        precision: one of `oneflow_accel.precision.PRECISIONS`.
        reduce_dtype: what several processes add gradients up in, eagerly: float32 or bfloat16.
        log_every: optimizer steps between two log lines.
        limit_train: optimizer steps per epoch: a number, a share of them (float), or None for all.
        limit_val: images of validation and test: a number of steps' images, a share, or None.
        check_val_every: epochs between two validations.
        val_every_steps: optimizer steps between two, in place of epochs.
        fast_dev_run: batches of a trial run, 0 for a real one.
        fsdp: how the model is cut over the processes, one of `sharding.MODES`; None: whole.
        per_step: the schedule's time is optimizer steps, and else epochs.
        by_steps: the data have no epochs, so that lines on the console count steps.
        way_on: what its user types to go on with a run that was told to stop.
        way_to_more: what its user types where all steps are done.
    """

    max_epochs: int | None = None
    min_epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip: float | None = None
    precision: str = "float32"
    reduce_dtype: str = "float32"
    graph: bool = False
    log_every: int = 50
    limit_train: int | float | None = None
    limit_val: int | float | None = None
    check_val_every: int = 1
    val_every_steps: int | None = None
    fast_dev_run: int = 0
    fsdp: str | None = None
    per_step: bool = False
    by_steps: bool = False
    way_on: str = "go on with resume=auto"
    way_to_more: str = (
        "ask for more trainer.max_epochs or trainer.max_steps, or give eval.ckpt to evaluate"
    )


def read_trainer_options(cfg: Mapping[str, Any]) -> TrainerOptions:
    """The groups `trainer` and `train`; UserError names the key of a value that no run can have."""
    from flow_train.config import keys, schema  # late: see keys.py

    trainer = schema.read(keys.Trainer, section(cfg, "trainer"), "trainer")
    return TrainerOptions(
        max_epochs=trainer.max_epochs,
        min_epochs=trainer.min_epochs or 1,
        max_steps=trainer.max_steps,
        accumulate=trainer.accumulate_grad_batches,
        clip=trainer.gradient_clip_val,
        precision=canonical(trainer.precision),
        reduce_dtype=trainer.reduce_dtype,
        graph=trainer.graph,
        log_every=trainer.log_every_n_steps,
        limit_train=trainer.limit_train_batches,
        limit_val=trainer.limit_val_batches,
        check_val_every=trainer.check_val_every_n_epoch,
        fast_dev_run=int(trainer.fast_dev_run),
        fsdp=trainer.fsdp,
        per_step=section(cfg, "train").get("scheduler_interval") == "step",
    )


def limited(count: int, limit: int | float | None) -> int:
    """How many of `count` a limit leaves: at least 1, or 0 where it says 0."""
    if limit is None:
        return count
    if limit == 0:
        return 0
    if isinstance(limit, float) and limit <= 1:
        return max(1, math.floor(count * limit))
    return min(count, int(limit))


@dataclass
class Position:
    """The next thing to do is batch `batch` of epoch `epoch`; `step` optimizer steps are done."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


class Calendar:
    """The steps of a run, made from the batches per epoch of its training data and its schedule,
    whose learning rates take the place of the optimizer's own.

    Attributes:
        batches: used per epoch.
        steps_per_epoch: optimizer steps; the last one may take fewer batches than the others.
        epochs: of the run, None where only `max_steps` ends it.
    """

    def __init__(
        self, options: TrainerOptions, batches: int, schedule: Callable[[float], float]
    ) -> None:
        self._options = options
        self._schedule = schedule
        # Limits count steps, so that a step made of other batches, on more processes or with more
        # accumulated, gives the same run.
        steps = math.ceil(batches / options.accumulate)
        steps = limited(steps, options.limit_train)
        self.batches = min(batches, steps * options.accumulate)
        self.epochs = options.max_epochs
        if options.fast_dev_run:
            self.batches = min(batches, options.fast_dev_run)
            self.epochs = 1
        self.steps_per_epoch = math.ceil(self.batches / options.accumulate)

    def last_step(self, position: Position) -> int:
        """Steps that the run has done when it ends; those before `position` were perhaps of another
        size."""
        ends = []
        if self.epochs is not None:
            begun = math.ceil(position.batch / self._options.accumulate)
            left = (self.epochs - position.epoch) * self.steps_per_epoch - begun
            ends.append(position.step + max(0, left))
        if self._options.max_steps is not None:
            ends.append(self._options.max_steps)
        return min(ends)

    def learning_rate(self, step: int, position: Position) -> float:
        """The learning rate of a step, counted from 0, not before `position.step`."""
        if self._options.per_step:
            return self._schedule(step)
        begun = math.ceil(position.batch / self._options.accumulate)
        epochs = (begun + step - position.step) // self.steps_per_epoch
        return self._schedule(position.epoch + epochs)

    def total_epochs(self) -> int:
        """The number of epochs of the run, the last of which `max_steps` may end early."""
        if self.epochs is not None:
            return self.epochs
        assert self._options.max_steps is not None
        return math.ceil(self._options.max_steps / self.steps_per_epoch)
