"""`python -m oneflow_accel conformance`: whether a device does what this code base asks of one.

Checks run in processes of their own, so that one that ends its process is one failure. The exit
code is 0 if none fails, 1 if one does, and 2 if the device cannot be used.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel import backends, report, settings
from oneflow_accel.backends.cuda import TF32_VARIABLE
from oneflow_accel.conformance.checks import CHECKS, STEPS
from oneflow_accel.conformance.child import FAIL, NOT_SUPPORTED, PASS
from oneflow_accel.errors import UserError

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Raised when a key changes its meaning or goes away; new keys leave it alone.
SCHEMA = 1
# Seconds without news, after which a process is ended.
_PATIENCE = 60.0
_WORDS = {PASS: "[green]PASS[/]", FAIL: "[bold red]FAIL[/]", NOT_SUPPORTED: "not supported"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=argparse.SUPPRESS, help="which device")
    shown = ", ".join(f"{step} ({text})" for step, text in STEPS.items())
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", choices=STEPS, help=f"these steps of: {shown}"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there; -: print it")


def run(args: argparse.Namespace, width: int | None) -> int:
    """Check the device, print and write the report; returns the exit code."""
    name = backends.resolve(args.device).backend.name
    on_stdout = args.json == "-"
    if args.json and not Path(args.json).parent.is_dir():
        raise UserError(f"--json {args.json}: there is no such folder")
    console = Console(width=width, file=sys.stderr if on_stdout else sys.stdout)
    found = _report(name, list(_results(name, args.only or list(STEPS))))
    _render(found, console)
    text = json.dumps(found, indent=1)
    if on_stdout:
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n")
    return 1 if found["summary"][FAIL] else 0


def summary_text(found: dict[str, Any]) -> str:
    """A report in one line."""
    return ", ".join(f"{count} {status}" for status, count in found["summary"].items())


def _report(name: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    state = report.collect(name)
    device = next(device for device in state["devices"] if device["name"] == name)
    counted = collections.Counter(check["status"] for check in checks)
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "device": name,
        "source": device["source"],
        "properties": device["properties"],
        "versions": state["versions"],
        "environment": state["environment"],
        "summary": {status: counted[status] for status in _WORDS},
        "checks": checks,
    }


def _render(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{found['device']}: {found['properties']['name']}", title_justify="left")
    for column in ("step", "check", "state", "why"):
        table.add_column(column, overflow="fold")
    step = None
    for check in found["checks"]:
        shown = "" if check["step"] == step else check["step"]
        step = check["step"]
        name = escape(check["name"])
        table.add_row(shown, name, _WORDS[check["status"]], escape(check["reason"]))
    console.print(table)
    console.print(summary_text(found))


def _results(device: str, steps: Sequence[str]) -> Iterator[dict[str, Any]]:
    for processes in (1, 2):
        chosen = ((number, check) for number, check in enumerate(CHECKS) if check.step in steps)
        numbers = [number for number, check in chosen if check.processes == processes]
        while numbers:
            for number, end in _run(device, numbers, processes):
                check = CHECKS[number]
                about = {"step": check.step, "name": check.name, "feature": check.needs}
                yield {**about, **{key: end[key] for key in ("status", "reason", "seconds")}}
                numbers.remove(number)


def _run(
    device: str, numbers: Sequence[int], processes: int, tries: int = 2
) -> list[tuple[int, dict[str, Any]]]:
    """Run these in one process, or in several; what it has found before it ended, the first of them
    at least. UserError where the one process cannot use the device."""
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder, "results"), Path(folder, "errors")
        path.touch()
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "oneflow_accel.launch", "--master_port", "auto"]
            command += ["--nproc_per_node", str(processes)]
        command += ["-m", "oneflow_accel.conformance.child", device, str(path)]
        # The patches are those for the device that is expected. TF32 is not float32.
        environment = {**os.environ, settings.DEVICE.name: device, TF32_VARIABLE: "0"}
        with open(errors, "w") as file:
            child = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
            ended = _wait(child, path)
        error = _last_error(errors.read_text(errors="replace"))
        # One that was ended may have left half a line.
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    if not lines and not ended and tries > 1:
        # One start of several processes in a hundred hangs (docs/troubleshooting.md).
        return _run(device, numbers, processes, tries - 1)
    why = f"it did not end in {_PATIENCE:.0f} s"
    if ended:
        code = child.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        why = f"its process ended ({how}): {error}"
    if not lines and processes == 1:
        said = error.partition("error: ")[2]
        raise UserError(said or f"device '{device}' cannot be used: {why}")
    return _found(lines or [{"number": numbers[0], "lacks": None}], numbers, processes, why)


def _found(
    lines: Sequence[dict[str, Any]], numbers: Sequence[int], processes: int, why: str
) -> list[tuple[int, dict[str, Any]]]:
    """How each check ended, of those that began, up to the first failure. One that has not ended in
    every process has ended its process, and `why` says how."""
    found = []
    for number in numbers:
        own = [line for line in lines if line["number"] == number]
        if not own:
            break
        ends = [line for line in own if "status" in line]
        # Of several processes, what is worst counts.
        ends.sort(key=lambda line: [FAIL, PASS, NOT_SUPPORTED].index(line["status"]))
        if not ends or (ends[0]["status"] != FAIL and len(ends) < processes):
            lacks = own[0]["lacks"]
            status, reason = (FAIL, why) if lacks is None else (NOT_SUPPORTED, lacks)
            ends = [{"status": status, "reason": reason, "seconds": 0.0}]
        found.append((number, ends[0]))
        if ends[0]["status"] == FAIL:
            break
    return found


def _wait(child: subprocess.Popen[bytes], path: Path) -> bool:
    """Whether the process has ended by itself."""
    size, since = -1, time.monotonic()
    try:
        while child.poll() is None and time.monotonic() - since < _PATIENCE:
            time.sleep(0.02)
            if path.stat().st_size != size:
                size, since = path.stat().st_size, time.monotonic()
        return child.poll() is not None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _last_error(text: str) -> str:
    """The last line that says what is wrong; a stack's follow it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line or "Check failed" in line]
    return (errors or lines or ["it said nothing"])[-1][:300]
