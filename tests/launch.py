"""Run code in processes of its own: subprocess tests and multi-process launches."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from oneflow_accel.rendezvous import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
# oneflow.distributed.launch without the package around it, whose import takes two seconds; this one
# sees twenty times a second, not once, whether a process has ended.
_LAUNCH = """
import runpy, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds / 20)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LAUNCHER = Path(importlib.util.find_spec("oneflow").origin).parent / "distributed" / "launch.py"


def child_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a started process gets: the repository importable, and of lanes of tests one thread
    each, unless `env` says otherwise."""
    alone = {"ONEFLOW_ACCEL_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {}
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **alone, **(env or {})}


def run_process(
    args: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS...` with the repository importable; at `timeout` s its group is killed."""
    process = subprocess.Popen(
        [sys.executable, *map(os.fspath, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=child_environment(env),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise subprocess.TimeoutExpired(process.args, timeout, output=output) from error
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def run_several(
    module: str, lines: Sequence[Sequence[object]], processes: int = 1, *, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Call MODULE.main with one command line after the other, in so many processes."""
    args = several_runs([(module, *line) for line in lines])
    if processes > 1:
        return run_distributed(args, processes, timeout=timeout)
    return run_process(args, timeout=timeout)


def several_runs(lines: Sequence[Sequence[object]], *more: str) -> list[str | os.PathLike[str]]:
    """What runs command lines that begin with a module."""
    text = json.dumps([list(map(str, line)) for line in lines])
    return [REPOSITORY / "tests" / "several_runs.py", text, *more]


def run_distributed(
    args: Sequence[str | os.PathLike[str]],
    nproc: int,
    *,
    timeout: float = 180,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    """What `python -m oneflow.distributed.launch --nproc_per_node NPROC ARGS...` does.

    One that does not end is tried again: about 1 of 100 starts of oneflow 0.9.0 hangs.
    """
    for attempt in (1, 2):
        launcher = ["-c", _LAUNCH, LAUNCHER, "--nproc_per_node", str(nproc)]
        launcher += ["--master_port", str(free_port()), *args]
        try:
            return run_process(launcher, timeout=timeout, env=env, cwd=cwd)
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
    raise AssertionError("unreachable")
