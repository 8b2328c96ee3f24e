"""What a run says on the console while it trains, and while it evaluates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oneflow_accel import distributed

from flow_train.metrics.figures import Figures, log_line
from flow_train.metrics.progress import LONGEST_SILENCE_S, Progress, format_eta
from flow_train.position import Position
from flow_train.validation import Tally

# What a line ends with: label, name in metrics.jsonl and format.
_MORE = (
    ("LR", "lr", ".3e"),
    ("Grad", "grad_norm", ".3e"),
    ("MFU", "mfu", ".1f"),
    ("GB", "peak_memory_gb", ".2f"),
)


class EpochLines:
    """The lines of one epoch, by process 0. `progress` counts the epoch's batches, `accumulate` of
    which make a step; the run keeps `position` up to date."""

    def __init__(
        self, progress: Progress, position: Position, last_step: int, accumulate: int
    ) -> None:
        self._progress = progress
        self._position = position
        self._last_step = last_step
        self._accumulate = accumulate
        self._said_at = time.monotonic()
        # Figures that are shown beside the bar.
        self.shown: dict[str, str] = {}

    def figures(self, now: Figures, epoch: Figures, values: Mapping[str, float]) -> None:
        """The line of a log step: figures since the last one and, in brackets, of the epoch; then
        those of `values` that have a place."""
        more = [f"{label} {values[key]:{form}}" for label, key, form in _MORE if key in values]
        self._print("\t".join([log_line(now, epoch), *more]), epoch.step_seconds)
        self.shown = {"img/s": f"{now.images_per_second:.1f}", "loss": f"{now.loss:.3f}"}

    def break_silence(self) -> None:
        """Where log lines are far apart, say how far the run is. There are no figures, as those
        would wait for the device."""
        rate = self._progress.rate() / self._accumulate
        if rate > 0 and time.monotonic() - self._said_at > LONGEST_SILENCE_S:
            self._print(f"{1 / rate:.1f} s per step", 1 / rate)

    def _print(self, text: str, step_seconds: float) -> None:
        position, batches = self._position, self._progress.total
        remaining = (self._last_step - position.step) * step_seconds
        place = f"Epoch: [{position.epoch}][{position.batch:{len(str(batches))}d}/{batches}]"
        self._progress.print(f"{place}\t{text}\tETA {format_eta(remaining)}")
        self._said_at = time.monotonic()


@contextmanager
def evaluation_lines(
    loader: Any, split: str, log_every: int, max_batches: int | None = None
) -> Iterator[Callable[[Tally], None]]:
    """What process 0 says while it evaluates: a bar on a terminal, and log lines with the accuracy
    of its share so far, the images per second of all processes and the remaining time. Lines begin
    with `split` and are `log_every` batches apart, or `LONGEST_SILENCE_S`. Gives `validate`'s
    `watch`."""
    batches = len(loader) if max_batches is None else min(max_batches, len(loader))
    width = len(str(batches))
    said_at = time.monotonic()
    with Progress(batches, "batch", enabled=distributed.is_main()) as progress:

        def watch(tally: Tally) -> None:
            nonlocal said_at
            progress.update()
            now = time.monotonic()
            is_due = tally.batches % log_every == 0 or tally.batches == batches
            if not distributed.is_main() or not (is_due or now - said_at > LONGEST_SILENCE_S):
                return
            said_at = now
            accuracy = tally.accuracy()
            rate = progress.rate() * loader.global_batch_size
            progress.print(
                f"{split}: [{tally.batches:{width}d}/{batches}]\tLoss {accuracy.loss:.4f}\t"
                f"Acc@1 {accuracy.acc1:.3f}\tAcc@5 {accuracy.acc5:.3f}\t{rate:.1f} images/s\t"
                f"ETA {format_eta(progress.eta_seconds())}"
            )

        yield watch
