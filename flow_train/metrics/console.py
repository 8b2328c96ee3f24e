"""What a run says on the console while it trains."""

from __future__ import annotations

import time

from flow_train.metrics.figures import Figures, log_line
from flow_train.metrics.progress import LONGEST_SILENCE_S, Progress, format_eta
from flow_train.position import Position


class EpochLines:
    """The lines of one epoch, by process 0.

    Args:
        progress: of the epoch, in batches.
        position: where the run stands, kept up to date by the run.
        last_step: number of steps that it has done when it ends.
        accumulate: batches per step.
    """

    def __init__(
        self, progress: Progress, position: Position, last_step: int, accumulate: int
    ) -> None:
        self._progress = progress
        self._position = position
        self._last_step = last_step
        self._accumulate = accumulate
        self._said_at = time.monotonic()

    def figures(self, now: Figures, epoch: Figures, lr: float) -> None:
        """The line of a log step: figures since the last one and, in brackets, of the epoch."""
        self._print(f"{log_line(now, epoch)}\tLR {lr:.3e}", epoch.step_seconds)

    def break_silence(self) -> None:
        """Where log lines are far apart, say how far the run is; does not wait for the device, and
        so there are no figures."""
        rate = self._progress.rate() / self._accumulate
        if rate > 0 and time.monotonic() - self._said_at > LONGEST_SILENCE_S:
            self._print(f"{1 / rate:.1f} s per step", 1 / rate)

    def _print(self, text: str, step_seconds: float) -> None:
        position, batches = self._position, self._progress.total
        remaining = (self._last_step - position.step) * step_seconds
        place = f"Epoch: [{position.epoch}][{position.batch:{len(str(batches))}d}/{batches}]"
        self._progress.print(f"{place}\t{text}\tETA {format_eta(remaining)}")
        self._said_at = time.monotonic()
