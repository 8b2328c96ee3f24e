"""Measures several programs against each other in one run.

Each program is a process that waits for work on stdin. In every round each one runs its steps
while the others sleep, so that what the machine does meanwhile hits all of them alike; the figure
of a program is its median over the rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Program:
    """One side of a comparison.

    Attributes:
        name: how tables call it.
        command: prints a line that begins with "ready", then one line with seconds for each line
            with a number of steps that it reads.
        env: added to the environment.
        version: what it printed after "ready".
        seconds: per step, one entry each round.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(programs: Sequence[Program], *, rounds: int, steps: int, warm_up: int = 2) -> None:
    """Fill in `seconds` and `version` of each program.

    Raises:
        RuntimeError: a program ended early; the message holds its name.
    """
    processes = []
    try:
        for program in programs:
            process = subprocess.Popen(
                program.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, **program.env},
            )
            processes.append(process)
            line = process.stdout.readline()
            while line and not line.startswith("ready"):
                line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{program.name} did not start: {' '.join(program.command)}")
            program.version = line.removeprefix("ready").strip()
            _steps(program, process, warm_up)
        for _ in range(rounds):
            for program, process in zip(programs, processes, strict=True):
                program.seconds.append(_steps(program, process, steps) / steps)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _steps(program: Program, process: subprocess.Popen[str], steps: int) -> float:
    try:
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        return float(process.stdout.readline())
    except (BrokenPipeError, ValueError) as error:
        raise RuntimeError(f"{program.name} ended while it was measured") from error
