"""How long a step takes, and how long it waits for its data."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from oneflow_accel import distributed

from flow_train.hooks.base import Hook

if TYPE_CHECKING:
    from flow_train.loop import Trainer

logger = logging.getLogger("oneflow_accel")


class SpeedMonitor(Hook):
    """Logs `time/intra_step (ms)`, from the images to the end of the step; `time/inter_step (ms)`,
    from there to the next images; `time/epoch (s)`.

    It is the wall time of the host in process 0, which runs ahead of an asynchronous device: a
    single step's figures mean little there, sums over many do.

    Args:
        intra_step_time: log the first.
        inter_step_time: log the second.
        epoch_time: log the third.
        verbose: print the first, too.
    """

    def __init__(
        self,
        intra_step_time: bool = True,
        inter_step_time: bool = True,
        epoch_time: bool = True,
        verbose: bool = False,
    ) -> None:
        self._intra = intra_step_time
        self._inter = inter_step_time
        self._epoch = epoch_time
        self._verbose = verbose
        self._epoch_began = self._step_began = 0.0
        self._step_ended: float | None = None
        self._waited: float | None = None

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._epoch_began = time.perf_counter()
        self._step_ended = None

    def on_evaluation_start(self, trainer: Trainer) -> None:
        # What the next step waits for is not its data.
        self._step_ended = None

    def on_step_start(self, trainer: Trainer) -> None:
        self._step_began = time.perf_counter()
        ended = self._step_ended
        self._waited = None if ended is None else self._step_began - ended

    def on_step_end(self, trainer: Trainer) -> None:
        self._step_ended = time.perf_counter()
        if not trainer.is_log_step or not distributed.is_main():
            return
        seconds = self._step_ended - self._step_began
        if self._intra:
            trainer.log({"time/intra_step (ms)": 1e3 * seconds})
        if self._inter and self._waited is not None:
            trainer.log({"time/inter_step (ms)": 1e3 * self._waited})
        if self._verbose:
            logger.info("step %d took %.1f ms", trainer.position.step, 1e3 * seconds)

    def on_epoch_end(self, trainer: Trainer) -> None:
        if self._epoch:
            seconds = time.perf_counter() - self._epoch_began
            trainer.log_now({"time/epoch (s)": seconds}, split="time")
