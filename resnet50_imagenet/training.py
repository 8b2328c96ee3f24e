"""The training run: epochs, log lines, checkpoints, resuming."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass
from typing import NoReturn

from oneflow_accel import distributed, layouts
from oneflow_accel.errors import CheckpointError

from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager
from flow_train.checkpoint.resume import CURVES_NAME, checkpoint_folder, require_no_other_run
from flow_train.data.images import ImageLoader
from flow_train.metrics.curves import draw_curves
from flow_train.metrics.figures import Figures, FigureWindow, log_line
from flow_train.metrics.log import JSONL_NAME, MetricLog, read_metrics
from flow_train.metrics.progress import Progress, format_eta
from flow_train.rng import get_rng_state, set_rng_state
from flow_train.stopping import StopRequest
from flow_train.validation import Accuracy, validate
from resnet50_imagenet.execution import TrainStep

logger = logging.getLogger("oneflow_accel")


@dataclass
class Position:
    """Where a run stands: the next thing to do is batch `batch` of epoch `epoch`."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_acc1: float = 0.0


class Trainer:
    """Trains a model and keeps its run on disk.

    Args:
        step: how one step is run.
        train_loader: this process's share of the training images.
        val_loader: what each epoch is validated on.
        options: the command line.
        num_classes: recorded in checkpoints.
        resumed: the checkpoint to go on from, None to begin.
    """

    def __init__(
        self,
        step: TrainStep,
        train_loader: ImageLoader,
        val_loader: ImageLoader,
        options: argparse.Namespace,
        *,
        num_classes: int,
        resumed: Checkpoint | None,
    ) -> None:
        self.step = step
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.options = options
        self.num_classes = num_classes
        self.checkpoints = CheckpointManager(checkpoint_folder(options.output_dir))
        self._stop = StopRequest()
        self._is_main = distributed.is_main()
        self._global_batch = train_loader.global_batch_size
        if resumed is None:
            self.position = Position(
                epoch=options.start_epoch, step=options.start_epoch * len(train_loader)
            )
            if self.position.step:
                step.load_optimizer_arrays({}, self.position.step)
        else:
            self.position = self._restore(resumed)
        if self._is_main:
            require_no_other_run(options.output_dir, None if resumed is None else resumed.folder)
            self.checkpoints.claim()

    @property
    def last_step(self) -> int:
        """Number of steps that the whole run has done when it ends."""
        steps = self.options.epochs * len(self.train_loader)
        return min(steps, self.options.max_steps or steps)

    def run(self) -> Position:
        """Train to the last epoch (or --max-steps), then draw the curves. A run that has done its
        steps is brought to its end: a kill may have come before that.

        Raises:
            UserError: the loss is not finite, the data cannot be read or the checkpoints cannot be
                written.
            SystemExit: the process was told to end (SIGTERM, Ctrl-C) and has written a checkpoint.
        """
        output_dir = self.options.output_dir
        log = MetricLog(output_dir, enabled=self._is_main)
        log.truncate(self.position.step)
        try:
            if self.position.step >= self.last_step:
                self._end_again(log)
            with self._stop.listening():
                while self.position.step < self.last_step:
                    best = False
                    if self._train_epoch(log):
                        accuracy = self._validate(log)
                        best = accuracy.acc1 >= self.position.best_acc1
                        self.position.best_acc1 = max(accuracy.acc1, self.position.best_acc1)
                        self.position.epoch += 1
                        self.position.batch = 0
                    self._save(best=best)
                    if self._stop.agreed() and self.position.step < self.last_step:
                        self._leave()
        finally:
            log.close()
        if self._is_main:
            curves = draw_curves(output_dir / JSONL_NAME, output_dir / CURVES_NAME)
            logger.info("curves: %s, checkpoints: %s", curves, self.checkpoints.directory)
        return self.position

    def _end_again(self, log: MetricLog) -> None:
        """Validate the last epoch where that was not logged."""
        logger.info(
            "nothing to train: step %d is done and the run ends at step %d; for more ask for more "
            "--epochs",
            self.position.step,
            self.last_step,
        )
        is_missing = False
        if self._is_main:
            logged = read_metrics(self.options.output_dir / JSONL_NAME)
            steps = {line["step"] for line in logged if line["split"] == "val"}
            is_missing = self.position.batch == 0 and self.position.step not in steps
        if distributed.all_gather_json(is_missing)[0]:
            self._validate(log)

    def _leave(self) -> NoReturn:
        logger.info(
            "told to stop (%s) at step %d; continue with --resume auto",
            self._stop.name,
            self.position.step,
        )
        raise SystemExit(self._stop.exit_code)

    def _train_epoch(self, log: MetricLog) -> bool:
        """Train to the end of the epoch; False where --max-steps or a signal ended it before."""
        position, options = self.position, self.options
        batches = len(self.train_loader)
        self.train_loader.set_epoch(position.epoch, start_batch=position.batch)
        self.step.set_training_mode()
        window = FigureWindow(reduce=not self.step.returns_global_figures)
        epoch = Figures()
        shown: dict[str, str] = {}
        with Progress(batches, "batch", enabled=self._is_main, done=position.batch) as progress:
            waiting_since = time.perf_counter()
            for batch in self.train_loader:
                waited = time.perf_counter() - waiting_since
                figures = self.step.step(batch.images, batch.labels, position.epoch)
                position.batch += 1
                position.step += 1
                window.add(position.step, figures, len(batch.labels), waited)
                ends = position.batch == batches or position.step == self.last_step
                saves = position.step % options.save_freq == 0 and not ends
                logs = ends or saves or position.step % options.print_freq == 0
                stops = not ends and self._told_to_stop(logs)
                # A checkpoint is written only after its losses have been looked at.
                if logs or stops:
                    now = window.fetch()
                    epoch += now
                    self._log(log, now)
                    progress.print(self._line(now, epoch))
                    shown = {"img/s": f"{now.images_per_second:.1f}", "loss": f"{now.loss:.3f}"}
                progress.update(1, **shown)
                if saves and not stops:
                    self._save(best=False)
                    window.restart_clock()
                if stops or position.step == self.last_step:
                    break
                waiting_since = time.perf_counter()
        return position.batch == batches

    def _told_to_stop(self, logs: bool) -> bool:
        """With several processes all have to stop at the same step, so they ask each other; on log
        steps only, where they wait for each other anyway."""
        if distributed.world_size() == 1:
            return self._stop.requested
        return logs and self._stop.agreed()

    def _log(self, log: MetricLog, now: Figures) -> None:
        position, batches = self.position, len(self.train_loader)
        log.log(
            position.step,
            {
                "loss": now.loss,
                "acc1": now.acc1,
                "acc5": now.acc5,
                "lr": self.step.learning_rate(position.epoch),
                "images_per_second": now.images_per_second,
                "step_seconds": now.step_seconds,
                "data_seconds": now.step_data_seconds,
                "epoch": position.epoch + position.batch / batches,
            },
        )

    def _line(self, now: Figures, epoch: Figures) -> str:
        position, batches = self.position, len(self.train_loader)
        remaining = (self.last_step - position.step) * epoch.step_seconds
        return (
            f"Epoch: [{position.epoch}][{position.batch:{len(str(batches))}d}/{batches}]\t"
            f"{log_line(now, epoch)}\tETA {format_eta(remaining)}"
        )

    def _validate(self, log: MetricLog) -> Accuracy:
        accuracy = validate(self.step.local_model(), self.val_loader, self.step.backend)
        log.log(self.position.step, accuracy.as_logged(), split="val")
        logger.info("Epoch: [%d] %s", self.position.epoch, accuracy)
        return accuracy

    def _save(self, *, best: bool) -> None:
        distributed.settle()
        model, optimizer = self.step.state_for_checkpoint()
        rng = distributed.all_gather_json(get_rng_state())
        if not self._is_main:
            return
        position = self.position
        state = {
            "num_classes": self.num_classes,
            "epoch": position.epoch,
            "batch": position.batch,
            "step": position.step,
            "best_acc1": position.best_acc1,
            "global_batch_size": self._global_batch,
            "seed": self.options.seed,
            "rng": rng,
        }
        self.checkpoints.save(
            Checkpoint(model, optimizer, state, name=self.options.arch),
            step=position.step,
            best=best,
        )

    def _restore(self, checkpoint: Checkpoint) -> Position:
        state = checkpoint.state
        restore_model(self.step.model, checkpoint, self.options.arch, self.num_classes)
        self.step.load_optimizer_arrays(checkpoint.optimizer, state["step"])
        # A process that was not there before goes on with the first one's state.
        rng, rank = state["rng"], distributed.rank()
        set_rng_state(rng[rank if rank < len(rng) else 0])
        batch = state["batch"]
        if state["global_batch_size"] != self._global_batch:
            batch = min(
                batch * state["global_batch_size"] // self._global_batch, len(self.train_loader)
            )
            logger.warning(
                "a batch is %d images now and was %d: the epoch goes on at the nearest batch",
                self._global_batch,
                state["global_batch_size"],
            )
        logger.info("resumed at epoch %d, step %d", state["epoch"], state["step"])
        return Position(state["epoch"], batch, state["step"], state["best_acc1"])


def restore_model(model: nn.Module, checkpoint: Checkpoint, arch: str, num_classes: int) -> None:
    """Load a checkpoint's parameters and buffers into a model, in whichever layout it is.

    Raises:
        CheckpointError: the checkpoint is of another architecture or number of classes; names both.
    """
    theirs = (checkpoint.name, checkpoint.state.get("num_classes"))
    if theirs != (arch, num_classes):
        raise CheckpointError(
            f"the checkpoint is of another model: {theirs[0]} with {theirs[1]} classes, this run "
            f"is {arch} with {num_classes}"
        )
    layouts.load_standard_state_dict(model, checkpoint.model, strict=True)
