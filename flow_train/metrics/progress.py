"""Progress of a loop: a bar on a terminal, and rate and remaining time for log lines."""

from __future__ import annotations

import math
import sys
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

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
            print(text, flush=True)

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
