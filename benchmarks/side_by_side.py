"""Measures several sides against each other in one run.

Each side is a process that waits for work on stdin (serve.py). In every round each one runs its
steps while the others sleep, so that what the machine does meanwhile hits all of them alike; the
figure of a side is its median over the rounds.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.items import Item
from flow_train.compare.rows import in_turns

REPOSITORY = Path(__file__).resolve().parent.parent
MOST_STEPS = 500


class SideError(RuntimeError):
    """A side's process ended; the text holds the last line it wrote."""


@dataclass
class Side:
    """One side of a comparison: how tables call it, the command of a process that runs `serve`,
    what is added to its environment, and the version that it printed after "ready"."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    _process: subprocess.Popen[str] | None = None
    _errors: IO[str] | None = None

    def seconds(self, item: Item, steps: int) -> float:
        """Run steps of an item; starts the process where there is none. SideError if it ended, as
        stock OneFlow does on operators that have no kernel."""
        process = self._process or self._start()
        try:
            process.stdin.write(f"{item.name}\t{steps}\n")
            process.stdin.flush()
            return float(process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            raise SideError(self._last_words()) from error

    def _start(self) -> subprocess.Popen[str]:
        # Open as long as the process runs; stop() closes it.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **self.env},
        )
        line = self._process.stdout.readline()
        while line and not line.startswith("ready"):
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} did not start: {self._last_words()}")
        self.version = line.removeprefix("ready").strip()
        return self._process

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        self.stop()
        return lines[-1] if lines else "it ended without a word"

    def stop(self) -> None:
        """End the process; the next `seconds` starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._errors.close()
            self._process = None


def measure(
    runs: Mapping[str, tuple[Side, Item]], *, rounds: int, target: float, most: float = 30.0
) -> dict[str, float | str]:
    """Seconds per step of items, each on a side: the median over the rounds, or what the side said
    when it ended. In every round each run has its turn; two items need two sides, as a side keeps
    one item in memory. A side that ended is tried once more without the others, whose models may
    have left it no memory.

    The steps of a round should take `target` seconds, all rounds of a run at most `most`: items
    whose step is so long that they would take more get fewer rounds, but two.
    """
    results: dict[str, float | str] = {}
    steps: dict[str, int] = {}
    for name, (side, item) in runs.items():
        try:
            side.seconds(item, 1)
            second = max(side.seconds(item, 1), 1e-6)
            steps[name] = min(MOST_STEPS, max(1, round(target / second)))
            rounds = min(rounds, max(2, int(most / second)))
        except SideError as error:
            results[name] = str(error)

    def once(name: str) -> float:
        side, item = runs[name]
        if name not in results:
            try:
                return side.seconds(item, steps[name]) / steps[name]
            except SideError as error:
                # Such as one that the system has killed for memory: the others go on.
                results[name] = str(error)
        return math.nan

    seconds = in_turns(steps, rounds, once)
    for name in list(results) if len(runs) > 1 else []:
        for side, _ in runs.values():
            side.stop()
        results |= measure({name: runs[name]}, rounds=rounds, target=target, most=most)
    return {name: statistics.median(values) for name, values in seconds.items()} | results
