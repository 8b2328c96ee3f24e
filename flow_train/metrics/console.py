"""What a run says on the console while it trains and evaluates: a bar on a terminal, log lines."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oneflow_accel import distributed

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from flow_train.metrics.figures import Figures, log_line
from flow_train.options import Position, TrainerOptions
from flow_train.task import Tally


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


# Lines of figures go through it, as they are, so that a program can send them elsewhere too.
LINES = logging.getLogger("flow_train.lines")
LINES.setLevel(logging.INFO)
LINES.propagate = False
LINES.addHandler(_Said())


def say(line: str) -> None:
    LINES.info("%s", line)


# The rate is the mean over this many updates: steady to read, soon free of the slow first ones.
_WINDOW = 50
# A loop without a line for so long writes one, whatever its interval of log lines is.
LONGEST_SILENCE_S = 20.0


class Progress:
    """Counts what is done of a total, `done` units of it before this run (as after a resume). The
    bar is drawn on standard error, and only if that is a terminal; a log file gets nothing.
    `enabled` is False on all processes but the main one: no bar and no lines then."""

    def __init__(self, total: int, unit: str, enabled: bool = True, done: int = 0) -> None:
        self.total = total
        self.done = done
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), done)], maxlen=_WINDOW)
        self._enabled = enabled
        self._bar: RichProgress | None = None
        if enabled and sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn(unit),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA {task.fields[eta]}  {task.fields[text]}"),
                console=Console(stderr=True),
                transient=True,
                # The bar would send to standard error what was meant for a redirected standard
                # output.
                redirect_stdout=False,
            )
            self._task = self._bar.add_task(unit, total=total, completed=done, eta="-", text="")
            self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, n: int = 1, **fields: object) -> None:
        """Count `n` more units; `fields` are shown beside the bar as "name value"."""
        self.done += n
        self._marks.append((time.monotonic(), self.done))
        if self._bar is not None:
            text = "  ".join(f"{name} {value}" for name, value in fields.items())
            self._bar.update(
                self._task, completed=self.done, eta=format_eta(self.eta_seconds()), text=text
            )

    def print(self, text: str) -> None:
        """Write a line to standard output, above the bar if both are on the terminal."""
        if self._bar is not None and sys.stdout.isatty():
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            say(text)

    def rate(self) -> float:
        """Units per second over the last updates; 0 before the first."""
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else 0.0

    def eta_seconds(self) -> float:
        """Seconds until the total is reached at the present rate; infinite while that is 0."""
        left = max(self.total - self.done, 0)
        rate = self.rate()
        if left == 0:
            return 0.0
        return left / rate if rate > 0 else math.inf

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def format_eta(seconds: float) -> str:
    """Seconds as "1:02:03", "2d 1:02:03" from a day on, or "?" if not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


# What a line ends with: label, name in metrics.jsonl and format.
_MORE = (
    ("LR", "lr", ".3e"),
    ("Grad", "grad_norm", ".3e"),
    ("MFU", "mfu", ".1f"),
    ("GB", "peak_memory_gb", ".2f"),
)


class EpochLines:
    """The lines of one epoch, by process 0. `progress` counts the epoch's batches; the run keeps
    `position` up to date."""

    def __init__(
        self, progress: Progress, position: Position, last_step: int, options: TrainerOptions
    ) -> None:
        self._progress = progress
        self._position = position
        self._last_step = last_step
        self._options = options
        self._said_at = time.monotonic()
        # Figures that are shown beside the bar.
        self.shown: dict[str, str] = {}

    def figures(self, now: Figures, epoch: Figures, values: Mapping[str, float]) -> None:
        """The line of a log step: figures since the last one and, in brackets, of the epoch; then
        those of `values` that have a place."""
        more = [f"{label} {values[key]:{form}}" for label, key, form in _MORE if key in values]
        self._print("\t".join([log_line(now, epoch), *more]), epoch.step_seconds)
        rate, loss = f"{now.units_per_second:.1f}", f"{values['loss']:.3f}"
        self.shown = {f"{now.task.unit}/s": rate, "loss": loss}

    def break_silence(self) -> None:
        """Where log lines are far apart, say how far the run is. There are no figures, as those
        would wait for the device."""
        rate = self._progress.rate() / self._options.accumulate
        if rate > 0 and time.monotonic() - self._said_at > LONGEST_SILENCE_S:
            self._print(f"{1 / rate:.1f} s per step", 1 / rate)

    def _print(self, text: str, step_seconds: float) -> None:
        position, batches = self._position, self._progress.total
        remaining = (self._last_step - position.step) * step_seconds
        place = f"Epoch: [{position.epoch}][{position.batch:{len(str(batches))}d}/{batches}]"
        if self._options.by_steps:
            steps = self._last_step
            place = f"Step: [{position.step:{len(str(steps))}d}/{steps}]"
        self._progress.print(f"{place}\t{text}\tETA {format_eta(remaining)}")
        self._said_at = time.monotonic()


@contextmanager
def evaluation_lines(
    loader: Any,
    split: str,
    log_every: int | None,
    max_batches: int | None = None,
    samples: str = "images",
) -> Iterator[Callable[[Tally], None]]:
    """What process 0 says while it evaluates: a bar on a terminal, and log lines with the figures
    of its share so far, the samples per second of all processes and the remaining time. Lines begin
    with `split` and are `log_every` batches apart, with one at the end, or `LONGEST_SILENCE_S`.
    Gives `validate`'s `watch`."""
    batches = len(loader) if max_batches is None else min(max_batches, len(loader))
    width = len(str(batches))
    said_at = time.monotonic()
    with Progress(batches, "batch", enabled=distributed.is_main()) as progress:

        def watch(tally: Tally) -> None:
            nonlocal said_at
            progress.update()
            now = time.monotonic()
            ends = tally.batches == batches
            is_due = log_every is not None and (ends or tally.batches % log_every == 0)
            if not distributed.is_main() or not (is_due or now - said_at > LONGEST_SILENCE_S):
                return
            said_at = now
            rate = progress.rate() * loader.global_batch_size
            progress.print(
                f"{split}: [{tally.batches:{width}d}/{batches}]\t{tally.line()}\t"
                f"{rate:.1f} {samples}/s\tETA {format_eta(progress.eta_seconds())}"
            )

        yield watch
