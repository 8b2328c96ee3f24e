"""Where a run stands, and which steps an epoch is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flow_train.options import TrainerOptions, limited


@dataclass
class Position:
    """The next thing to do is batch `batch` of epoch `epoch`; `step` optimizer steps are done."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


class Calendar:
    """The steps of a run, made from the batches per epoch of its training data and its schedule.

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
