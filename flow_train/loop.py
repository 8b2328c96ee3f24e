"""The training loop: epochs, batches, log lines, validation, checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend

import numpy as np
from oneflow import nn

from flow_train.checkpoint import snapshot
from flow_train.checkpoint.folders import Checkpoint, CheckpointManager
from flow_train.checkpoint.whole import Gathered
from flow_train.hooks import Hook
from flow_train.metrics.console import EpochLines, Progress, evaluation_lines, say
from flow_train.metrics.figures import Meter
from flow_train.metrics.log import RunLog
from flow_train.options import Calendar, Position, TrainerOptions
from flow_train.steps.eager import TrainStep
from flow_train.stopping import StopRequest
from flow_train.task import Batch, Evaluation, Task

logger = logging.getLogger("oneflow_accel")


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint says about the run that wrote it.

    `config` is the whole configuration, plain. `phase` names what the model's layers are, where a
    run may change them; `run` is the run's own name, for loggers.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    phase: Callable[[nn.Module], str | None] = lambda model: None
    run: str | None = None


@dataclass(frozen=True)
class Data:
    """What a run trains and validates on: an `ImageLoader` each, or what has its methods. `others`
    are evaluated at the same times, by the names of their splits in metrics.jsonl."""

    train: Any
    val: Any
    others: Mapping[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains a model and keeps its run on disk.

    Args:
        task: what it is trained for.
        make_step: how to train a model from a position on.
        hooks: by their key, in the order of their hooks.
        checkpoints: where checkpoints go; None for a trial run, which writes none.
        resumed: the checkpoint to go on from. The model has its weights already.
        start: where a run without one begins, or one whose position that checkpoint does not tell.

    Attributes:
        model: the model being trained; another one after layers have become dense.
        is_log_step: whether the step being run gets a log line.
        should_stop: set by a hook to end the run after the epoch.
        metrics: the last of each, as "train/loss", "val/acc".
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        make_step: Callable[[nn.Module, Position], TrainStep],
        data: Data,
        backend: Backend,
        options: TrainerOptions,
        calendar: Calendar,
        *,
        identity: RunIdentity,
        seed: int,
        hooks: Mapping[str, Hook],
        log: RunLog,
        checkpoints: CheckpointManager | None,
        resumed: Checkpoint | None = None,
        start: Position | None = None,
    ) -> None:
        self.task = task
        self.data = data
        self.backend = backend
        self.options = options
        self.calendar = calendar
        self.identity = identity
        self.seed = seed
        self.hooks = dict(hooks)
        self.is_log_step = False
        self.last_lr = 0.0
        self.should_stop = False
        self.metrics: dict[str, float] = {}
        self._log = log
        self._checkpoints = checkpoints
        self._resumed = resumed
        self._make_step = make_step
        self._stop = StopRequest()
        self._is_main = distributed.is_main()
        self._extra: dict[str, float] = {}
        # The lines of the epoch that is being trained; None between epochs.
        self._lines: EpochLines | None = None
        # The position that is on disk already, so that no moment is saved twice.
        self._saved: Position | None = None
        self._has_step = False
        if start is not None or resumed is None:
            self.position = start or Position()
        else:
            self.position = snapshot.position_of(
                resumed, calendar, self.global_batch_size, options.accumulate
            )
        self.use_model(model)
        if resumed is not None:
            snapshot.load_step(self.train_step, resumed, self.position)
        elif self.position.step:
            self.train_step.load_optimizer({}, self.position.step)

    def use_model(self, model: nn.Module) -> None:
        """Train `model` from here on, its optimizer without a past. A collective call."""
        if self._has_step:
            self.train_step.close()
        self._has_step = True
        self.train_step: TrainStep = self._make_step(model, self.position)
        self.model = self.train_step.model
        self.train_step.before_update = self._before_update
        self._meter = Meter(self.train_step, self.backend, self.options.precision)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, of all processes."""
        return int(self.data.train.global_batch_size) * self.options.accumulate

    @property
    def last_step(self) -> int:
        return self.calendar.last_step(self.position)

    @property
    def may_stop(self) -> bool:
        return self.position.epoch >= self.options.min_epochs

    @property
    def pause_follows(self) -> bool:
        step, options = self.position.step, self.options
        if options.by_steps and step == self.last_step:
            return True
        return val_batches(options) != 0 and self._validates_after(step)

    def fit(self, *, test_follows: bool = False) -> None:
        """Train to the end of the run. With `test_follows` the run's test is still due, also where
        all its steps are done. UserError if the loss is not finite, the data cannot be read or the
        checkpoints cannot be written; SystemExit if the process was told to end (SIGTERM, Ctrl-C)
        and has written a checkpoint."""
        is_complete = self._is_over() and not test_follows
        if is_complete:
            # Not an error: whatever restarts a run until it succeeds must see that it has.
            logger.info(
                "nothing left to train: step %d is done and the run ends at step %d; %s",
                self.position.step,
                self.last_step,
                self.options.way_to_more,
            )
        else:
            logger.info("%s", self._describe())
        # A new run in the folder of an old one without checkpoints keeps nothing of its log.
        self._log.truncate(-1 if self._resumed is None else self.position.step)
        with self._stop.listening():
            self._each(lambda hook: hook.on_fit_start(self))
            if self._resumed is not None:
                snapshot.load_hooks(self.hooks, self._resumed, self.train_step)
            if is_complete:
                if self.position.batch == 0 and not self._log.has(self.position.step, "val"):
                    self._validate()
                return
            while not (self._is_over() or self.should_stop):
                self._run_epoch()
        self._each(lambda hook: hook.on_fit_end(self))

    def _describe(self) -> str:
        position, options, calendar = self.position, self.options, self.calendar
        way = "nn.Graph" if options.graph else "eager"
        batch = self.data.train.batch_size
        phase = self.identity.phase(self.model)
        layers = "" if phase is None else f", {phase} layers"
        outlooks = (hook.outlook(self) for hook in self.hooks.values())
        to_come = "".join(f"; {text}" for text in outlooks if text)
        epochs = f"{calendar.steps_per_epoch} steps per epoch, from epoch {position.epoch}, "
        epochs = "from " if options.by_steps else epochs
        return (
            f"{self.identity.model}{layers}, {way}: "
            f"{self.global_batch_size} {self.task.samples} per step = {batch} x "
            f"{self.train_step.replicas} processes x {options.accumulate} accumulated, {epochs}"
            f"step {position.step} to step {self.last_step}{to_come}"
        )

    def _run_epoch(self) -> None:
        self._each(lambda hook: hook.on_epoch_start(self))
        if self._train_epoch():
            self.position.epoch += 1
            self.position.batch = 0
            by_steps, position = self.options.val_every_steps, self.position
            is_due = by_steps is None and position.epoch % self.options.check_val_every == 0
            if is_due or self._is_over() or self._validates_after(position.step):
                self._validate()
            self._each(lambda hook: hook.on_epoch_end(self))
        else:
            self._each(lambda hook: hook.on_interrupt(self))
        if self._stop.agreed():
            logger.info(
                "told to stop (%s) at step %d%s",
                self._stop.name,
                self.position.step,
                self._way_on(),
            )
            self._log.close()
            raise SystemExit(self._stop.exit_code)

    def _way_on(self) -> str:
        kept = self._checkpoints is not None and "model_checkpoint" in self.hooks
        return f"; {self.options.way_on}" if kept else ""

    def _is_over(self) -> bool:
        return self.position.step >= self.last_step and self.position.batch < self.calendar.batches

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch; False where the run ends before."""
        position, batches = self.position, self.calendar.batches
        # A run that goes on begins in the middle: the loader leaves out what was trained on, and
        # gives the rest in the order that it would have had.
        position.batch = min(position.batch, batches)
        self.data.train.set_epoch(position.epoch, start_batch=position.batch)
        self.model.train()
        self._meter.begin_epoch()
        last_step = self.last_step
        with Progress(batches, "batch", enabled=self._is_main, done=position.batch) as progress:
            lines = EpochLines(progress, position, last_step, self.options)
            self._lines = lines
            for batch, count, waited in self._global_batches(batches - position.batch):
                ends_epoch = position.batch + count == batches
                # Figures stay on the device until somebody reads them, so that the next step is
                # prepared while this one runs; only these steps wait for their figures.
                self.is_log_step = (
                    ends_epoch
                    or position.step + 1 == last_step
                    or (position.step + 1) % self.options.log_every == 0
                    or self._validates_after(position.step + 1)
                )
                self._run_step(batch, waited)
                position.batch += count
                position.step += 1
                # From here on the step is done: what hooks save now goes on after it.
                self._each(lambda hook: hook.on_step_end(self))
                if self.is_log_step:
                    self._write_line()
                progress.update(count, **lines.shown)
                lines.break_silence()
                # At the end of an epoch the epoch's own validation serves.
                if self._validates_after(position.step) and not ends_epoch:
                    self._validate()
                    self._each(lambda hook: hook.on_pause(self))
                    self.model.train()
                if position.step == last_step or self.should_stop or self._told_to_stop():
                    break
        self._lines = None
        return position.batch == batches

    def _global_batches(self, batches: int) -> Iterator[tuple[Batch, int, float]]:
        """This process's share of each step's batch, of how many of the loader's it is made, and
        the seconds that it was waited for."""
        loader, since = islice(self.data.train, batches), time.perf_counter()
        while given := list(islice(loader, self.options.accumulate)):
            # Not what comes now: where data is tensors, arrays of them wait for the last step.
            waited = time.perf_counter() - since
            window = list(map(self.task.arrays, given))
            arrays = window[0]
            if len(window) > 1:
                arrays = {name: np.concatenate([each[name] for each in window]) for name in arrays}
            yield arrays, len(window), waited
            since = time.perf_counter()

    def _validates_after(self, step: int) -> bool:
        """Whether a validation is due after so many steps, wherever in an epoch that is."""
        every = self.options.val_every_steps
        return every is not None and step % every == 0

    def _run_step(self, batch: Batch, waited: float) -> None:
        position = self.position
        self._each(lambda hook: hook.on_step_start(self))
        self._meter.look_at(batch)
        self.train_step.wants_norm = self.is_log_step
        self.last_lr = self.calendar.learning_rate(position.step, position)
        # This seeds dropout and drop path: a resumed run draws what it would have drawn.
        seed = self.train_step.seed(self.seed, position.step)
        if seed is not None:
            self.backend.manual_seed(seed)
        figures = self.train_step.step(batch, self.last_lr)
        self._meter.add(position.step + 1, figures, batch, waited)

    def _told_to_stop(self) -> bool:
        """With several processes all must stop at the same step, so they ask each other; on log
        steps only, where they wait for each other anyway."""
        if distributed.world_size() == 1:
            return self._stop.requested
        return self.is_log_step and self._stop.agreed()

    def _before_update(self) -> None:
        self._each(lambda hook: hook.before_update(self))

    def _each(self, call: Callable[[Hook], None]) -> None:
        for hook in self.hooks.values():
            call(hook)

    def _write_line(self) -> None:
        """Wait for the device and log the steps since the last line, if there are any."""
        if not len(self._meter):
            return
        position = self.position
        part = position.batch / self.calendar.batches
        values = self._meter.read(self.last_lr, position.epoch + part)
        extra, self._extra = self._extra, {}
        self._log.log(position.step, {**values, **extra})
        self.metrics |= self.task.named(self._meter.epoch.as_logged(), "train")
        if self._lines is not None:
            self._lines.figures(self._meter.now, self._meter.epoch, values)

    def _validate(self) -> None:
        if val_batches(self.options) == 0:
            return
        metrics: dict[str, float] = {}
        for split, loader in {"val": self.data.val, **self.data.others}.items():
            if loader is None:
                continue
            found = self.evaluate(loader)
            metrics |= self.task.named(found.as_logged(), split)
            self._log.log(self.position.step, found.as_logged(), split=split)
            if self._is_main:
                epoch = self.position.epoch - (self.position.batch == 0)
                by_steps = f"Step: [{self.position.step}] {split}"
                say(f"{by_steps if self.options.by_steps else f'Epoch: [{epoch}]'} {found}")
        self.metrics |= metrics
        self._each(lambda hook: hook.on_validation_end(self, metrics))

    def evaluate(self, loader: Any) -> Evaluation:
        """What the model does on a loader's data, with the weights that hooks want evaluated."""
        self._each(lambda hook: hook.on_evaluation_start(self))
        model = self.train_step.evaluated_model()
        limit = val_batches(self.options)
        with ExitStack() as stack:
            for hook in self.hooks.values():
                stack.enter_context(hook.evaluation_weights(self, model))
            lines = evaluation_lines(loader, "validation", None, limit, self.task.samples)
            return self.task.evaluate(
                model,
                loader,
                self.backend,
                max_batches=limit,
                watch=stack.enter_context(lines),
                collective=self.train_step.is_collective,
            )

    def log(self, values: Mapping[str, float]) -> None:
        self._extra |= values

    def log_now(self, values: Mapping[str, float], *, split: str) -> None:
        self._log.log(self.position.step, values, split=split)

    def log_hyperparameters(self, values: Mapping[str, float]) -> None:
        self._log.log(self.position.step, values, split="model")
        self._log.hyperparameters(values)
        logger.info("%s", ", ".join(f"{name} {value:,}" for name, value in values.items()))

    def steps_on_disk(self) -> set[int]:
        """Steps that the run's folder has checkpoints of; the same answer on every process."""
        found = [] if self._checkpoints is None else sorted(self._checkpoints.steps())
        return set(distributed.all_gather_json(found)[0])

    def checkpoint(self) -> Checkpoint:
        """The run as it stands. A collective call."""
        identity = self.identity
        state = {
            **self.task.state(),
            **dataclasses.asdict(self.position),
            "phase": identity.phase(self.model),
            "global_batch_size": self.global_batch_size,
            "accumulate": self.options.accumulate,
            "seed": self.seed,
            "config": identity.config,
        }
        return snapshot.take(self.train_step, self.hooks, state, name=identity.model)

    def save_checkpoint(self, *, best: bool = False, keep: Collection[int] = ()) -> None:
        """Write a checkpoint of now, after a look at the losses; all processes call it. The
        checkpoints of the steps in `keep` stay."""
        if self._checkpoints is None or (self._saved == self.position and not best):
            return
        distributed.settle()
        self._write_line()
        checkpoint = self.checkpoint()
        if checkpoint.layout is not None:
            self._checkpoints.save_shards(checkpoint, step=self.position.step, best=best, keep=keep)
        elif isinstance(checkpoint.model, Gathered):
            self._checkpoints.save_gathered(
                checkpoint, step=self.position.step, best=best, keep=keep
            )
        elif self._is_main:
            self._checkpoints.save(checkpoint, step=self.position.step, best=best, keep=keep)
        self._saved = dataclasses.replace(self.position)
        self._meter.restart_clock()


def val_batches(options: TrainerOptions) -> int | None:
    """The number of batches used of a validation or test loader; None for all: a loader has left
    out already what is beyond trainer.limit_val_batches."""
    if options.fast_dev_run:
        return options.fast_dev_run
    return 0 if options.limit_val == 0 else None
