"""Trains in a process of its own: what fails there, or uses up memory, stays there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# The file in the run's folder that gets what the run prints.
OUTPUT = "output.txt"
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """How a process ended: its exit code, negative where a signal ended it, and whether this
    process or that one got a SIGINT or SIGTERM meanwhile."""

    code: int
    told_to_stop: bool = False

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        hint = ", perhaps for want of memory" if self.code == -signal.SIGKILL else ""
        return f"{signal.Signals(-self.code).name}{hint}"


def train(module: str, arguments: Sequence[str], folder: Path) -> Ended:
    """Run `python -m MODULE ARGUMENTS...`; what it prints is printed and appended to
    FOLDER/output.txt. A SIGTERM is passed on to it; after that, or after an interrupt from the
    keyboard, which reaches it anyway, its end is waited for. OSError if `folder` cannot be written
    to."""
    command = [sys.executable, "-m", module, *arguments]
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / OUTPUT).open("ab") as copy,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
        _signals_passed_on(process) as noted,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            copy.write(line)
            copy.flush()
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
        code = process.wait()
    by_signal = {end for number in _STOPPING for end in (128 + number, -number)}
    return Ended(code, bool(noted) or code in by_signal)


@contextlib.contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)
        # Ctrl-C is sent to both processes by the terminal.
        if signum == signal.SIGTERM:
            process.send_signal(signum)

    before = {number: signal.signal(number, note) for number in _STOPPING}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
