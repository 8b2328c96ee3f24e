"""Runs in processes of their own: what fails there, or uses up memory, stays there. `run` keeps
what a run prints, `ask` and `call` bring its figures back.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from oneflow_accel.errors import UserError

from flow_train.metrics.log import JSONL_NAME, read_metrics

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


def noted(path: Path) -> dict[str, Any]:
    """What a JSON file says of a run that has ended; nothing where it is not there, or torn."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def train(module: str, arguments: Sequence[str], folder: Path) -> Ended:
    """Run `python -m MODULE ARGUMENTS...`; what it prints is printed and appended to
    FOLDER/output.txt. OSError if `folder` cannot be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    return run(["-m", module, *arguments], folder / OUTPUT, mode="ab", printed=True)


def run(
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    mode: str = "wb",
    printed: bool = False,
) -> Ended:
    """Run Python with these arguments, in this process's environment where none is given; what it
    prints goes to the file `output`, and is printed where `printed` says so. A SIGTERM is passed on
    to it; after that, or after an interrupt from the keyboard, which reaches it anyway, its end is
    waited for."""
    with (
        output.open(mode) as copy,
        subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
        ) as process,
        _signals_passed_on(process) as noted,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            copy.write(line)
            copy.flush()
            if printed:
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
        code = process.wait()
    by_signal = {end for number in _STOPPING for end in (128 + number, -number)}
    return Ended(code, bool(noted) or code in by_signal)


def asking(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command that prints what a function of a module returns; that and the arguments as JSON
    has them."""
    module = sys.modules[function.__module__].__spec__
    assert module is not None
    own = [sys.executable, "-m", "flow_train.compare.process"]
    return [*own, module.name, function.__name__, json.dumps(arguments)]


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; `environment` is added to this process's. UserError with the end of
    that where it fails."""
    added = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=added, capture_output=True, text=True)
    if done.returncode != 0:
        text = (done.stdout + done.stderr)[-2000:]
        raise UserError(f"{shlex.join(command)} failed:\n{text}")
    return done.stdout


def ask(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """The last line that a command prints, as JSON; else as `output_of`."""
    return json.loads(output_of(command, environment).splitlines()[-1])


def logged(
    command: Sequence[str], option: str, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The metric log of a command whose output folder is the value of `option`, as `read_metrics`
    has it; else as `output_of`."""
    with tempfile.TemporaryDirectory() as folder:
        output_of([*command, option, folder], environment)
        return read_metrics(Path(folder) / JSONL_NAME)


def call(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """What a function of a module returns in a process of its own; see `asking` and `ask`."""
    return ask(asking(function, *arguments), environment)


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


if __name__ == "__main__":
    module, function, arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))
