"""A run: its folder, and what its processes agree on before it begins.

with Session(folder, RunIdentity("net", config), resume="auto") as run:
    model = ...
    run.fit(model, task, Data(train, val), Recipe(make_optimizer, lambda epoch: 0.1))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import distributed, layouts, watchdog
from oneflow_accel.backends import Backend
from oneflow_accel.errors import CheckpointError, UserError

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.folders import (
    CURVES_NAME,
    Checkpoint,
    CheckpointManager,
    agreed_checkpoint,
    claimed,
    way_on,
)
from flow_train.hooks import Hook, build_hooks
from flow_train.loop import Data, RunIdentity, Trainer
from flow_train.metrics.curves import draw_curves
from flow_train.metrics.log import JSONL_NAME, Logger, RunLog
from flow_train.options import Calendar, Position, TrainerOptions
from flow_train.rng import seed_all, settled_seed
from flow_train.steps.graph import MakeStep, step_maker
from flow_train.task import ImageTask, Task, TokenTask

# What a program of one's own needs.
__all__ = [
    "Data",
    "Hook",
    "ImageTask",
    "Recipe",
    "RunIdentity",
    "Session",
    "Task",
    "TokenTask",
    "TrainerOptions",
]

logger = logging.getLogger("oneflow_accel")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        optimizer: makes it from the model.
        schedule: the learning rate by epoch, or by step where the options say so.
        hooks: by their key, in the order of their calls.
        sharding: what `fully_shard` takes of a model that is, or will be, cut; else None.
        make_step: in place of `optimizer`, a step of one's own: of the model and the position.
    """

    optimizer: Callable[[nn.Module], flow.optim.Optimizer] | None
    schedule: Callable[[float], float]
    options: TrainerOptions = field(default_factory=lambda: TrainerOptions(max_epochs=1))
    hooks: Mapping[str, Hook] = field(
        default_factory=lambda: build_hooks(
            {"model_checkpoint": {"monitor": "val/loss", "mode": "min"}}
        )
    )
    sharding: Mapping[str, Any] | None = None
    make_step: MakeStep | None = None


class Session:
    """What the processes of a job agree on before a run begins, also where each machine has a disk
    of its own: the checkpoint that it goes on from, and its seed. From the claim of the folder on
    its log is open; in the end its curves are drawn.

    Args:
        folder: of the log, the checkpoints and the curves.
        backend: None for the selected one, where each process takes a device of its own.
        resume: "auto", a checkpoint or a run to go on from, or None.
        seed: None for any; a resumed run has the one that it began with.
        seed_option, resume_option: what is typed for them, for messages; no word on how to go on
            after an interrupt, where the latter is None.
        keeps: False for a trial, of which nothing is kept.
        by_all: each process writes checkpoints of its own shards.
        keep_last: the newest checkpoints that stay.
        loggers: the group `logger` of a configuration; `more_loggers` make others.
        found: what the run goes on from, where the caller has found it.
        accepts: raises a UserError for a checkpoint that is not to be resumed.
        resuming: as `agreed_checkpoint` takes it.

    Attributes:
        resumed: the checkpoint that the run goes on from; None for a new one.
        seed: that all generators of this process got.
        log: once the folder is claimed.

    Raises:
        UserError: as `agreed_checkpoint`, `settled_seed` and `claimed`, on all processes.
    """

    log: RunLog
    seed: int

    def __init__(
        self,
        folder: Path | str,
        identity: RunIdentity,
        resume: str | None = None,
        *,
        backend: Backend | None = None,
        seed: int | None = None,
        seed_option: str = "seed=",
        resume_option: str | None = "resume=auto",
        keeps: bool = True,
        by_all: bool = False,
        keep_last: int | None = 3,
        loggers: Mapping[str, Any] | None = None,
        more_loggers: Sequence[Callable[[], Logger]] = (),
        found: Checkpoint | None = None,
        accepts: Callable[[Checkpoint], None] | None = None,
        **resuming: Any,
    ) -> None:
        self.folder = Path(folder)
        self.identity = identity
        if backend is None:
            backend = oneflow_accel.current_backend()
            backend.take_own_device()
        self.backend = backend
        self.resumed = found
        self._resume = resume
        self._asked, self._seed_option, self._resume_option = seed, seed_option, resume_option
        self._keeps, self._by_all, self._keep_last = keeps, by_all, keep_last
        self._loggers, self._more_loggers = loggers or {}, more_loggers
        self._accepts, self._resuming = accepts, resuming
        self._own: Checkpoint | None = None
        self._checkpoints: CheckpointManager | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Session:
        if not watchdog.is_watching():
            self._exits.enter_context(watchdog.guard())
        with self._exits.pop_all() as exits:
            if self.resumed is None:
                self.resumed = agreed_checkpoint(self._resume, self.folder, **self._resuming)
            self._own = self.resumed
            if self.resumed is not None and self._accepts is not None:
                self._accepts(self.resumed)
            began_with = None if self.resumed is None else self.resumed.state.get("seed")
            self.seed = settled_seed(self._asked, began_with, option=self._seed_option)
            seed_all(self.seed, self.backend)
            self._exits = exits.pop_all()
        return self

    @property
    def first_step(self) -> int:
        """The number of steps done when it begins."""
        return 0 if self.resumed is None else int(self.resumed.state["step"])

    def load(self, model: nn.Module) -> nn.Module:
        """The model, on the device, with the weights of what is resumed, if that is anything.
        UserError where they are another model's."""
        if self.resumed is not None:
            if self.resumed.name != self.identity.model:
                raise CheckpointError(
                    f"the checkpoint is of {self.resumed.name!r}, and the model is "
                    f"{self.identity.model!r}"
                )
            layouts.load_standard_state_dict(model, dict(self.resumed.model), strict=True)
        return model.to(self.backend.device())

    def claim(self) -> None:
        """Take the folder, unless this run has it; other runs' folders are refused."""
        if hasattr(self, "log"):
            return
        if self._keeps:
            self._checkpoints = claimed(
                self.folder, self._own, keep_last=self._keep_last, by_all=self._by_all
            )
            self._exits.callback(self._checkpoints.close)
        self.log = RunLog(
            self.folder,
            self._loggers,
            run_name=self.identity.run or self.identity.model,
            config=self.identity.config,
            enabled=distributed.is_main() and self._keeps,
            more=self._more_loggers,
        )
        self._exits.callback(self.log.close)

    def fit(
        self,
        model: nn.Module,
        task: Task,
        data: Data,
        recipe: Recipe,
        *,
        start: int | Position = 0,
        test_follows: bool = False,
    ) -> Trainer:
        """Train to the end. The model is on the device, and has the weights of what is resumed. A
        run that resumes nothing begins at epoch `start`, any at a position; `test_follows` is
        `Trainer.fit`'s. UserError if there would be no step; and as `Trainer.fit`."""
        options = recipe.options
        calendar = Calendar(options, len(data.train), recipe.schedule)
        if calendar.batches == 0:
            raise UserError(
                "an epoch has no step: there are fewer training samples than a batch takes, or its "
                "steps are limited to 0"
            )
        begin = start if isinstance(start, Position) else None
        if isinstance(start, int) and self.resumed is None:
            begin = Position(start, 0, start * calendar.steps_per_epoch)
            if start and begin.step >= calendar.last_step(begin):
                raise UserError(
                    f"epoch {start} is step {begin.step}, and the run ends at step "
                    f"{calendar.last_step(begin)}: {options.way_to_more}"
                )
        self.claim()
        make_step = recipe.make_step
        if make_step is None:
            assert recipe.optimizer is not None
            part_size, sharding = data.train.batch_size, recipe.sharding
            make_step = step_maker(
                self.backend, options, calendar, recipe.optimizer, task, part_size, sharding
            )
        hooks = dict(recipe.hooks)
        if not self._keeps:
            hooks.pop("model_checkpoint", None)
        trainer = Trainer(
            model,
            task,
            make_step,
            data,
            self.backend,
            options,
            calendar,
            identity=self.identity,
            seed=self.seed,
            hooks=hooks,
            log=self.log,
            checkpoints=self._checkpoints,
            resumed=self.resumed,
            start=begin,
        )
        trainer.fit(test_follows=test_follows)
        return trainer

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._exits.__exit__(kind, error, trace)
        if kind is KeyboardInterrupt and self._resume_option is not None:
            raise KeyboardInterrupt(way_on(self.folder, self._resume_option)) from None
        if kind is None and self._checkpoints is not None and distributed.is_main():
            curves = draw_curves(self.folder / JSONL_NAME, self.folder / CURVES_NAME)
            logger.info("curves: %s, checkpoints: %s", curves or "off", self._checkpoints.directory)
