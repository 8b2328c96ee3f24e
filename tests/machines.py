"""Two machines: two launchers on this one, or in two network namespaces that a cable joins."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, free_port

# Network namespaces show more, where they can be made.
_CAN_SPLIT = os.geteuid() == 0 and shutil.which("ip") is not None
KINDS = ("namespaces" if _CAN_SPLIT else "loopback",)
_NETWORK = "10.231.77"


@dataclass
class Machines:
    """The first's address, what starts a command on each, the second's end of the cable."""

    address: str = "127.0.0.1"
    prefixes: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    cable: str = ""

    def popen(
        self,
        machine: int,
        command: Sequence[str | os.PathLike[str]],
        log: Path,
        *,
        env: Mapping[str, str],
        cwd: Path,
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.prefixes[machine], *map(os.fspath, command)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
                start_new_session=True,
            )


@contextlib.contextmanager
def two_machines(kind: str) -> Iterator[Machines]:
    """`kind` is "loopback" or "namespaces"; skips where network namespaces are not permitted."""
    if kind == "loopback":
        yield Machines()
        return
    if shutil.which("ip") is None:
        pytest.skip("no `ip` (iproute2) to make network namespaces with")
    names = [f"accel-{os.getpid()}-{number}" for number in (0, 1)]
    cables = [f"ac{os.getpid()}{letter}"[-15:] for letter in "ab"]
    try:
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True)):
            _ip("netns", "add", name)
            _ip("link", "set", cable, "netns", name)
            inside = ("-n", name)
            _ip(*inside, "address", "add", f"{_NETWORK}.{number + 1}/24", "dev", cable)
            _ip(*inside, "link", "set", cable, "up")
            _ip(*inside, "link", "set", "lo", "up")
        enter = tuple(["ip", "netns", "exec", name] for name in names)
        yield Machines(f"{_NETWORK}.1", (enter[0], enter[1]), cables[1])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", cables[0]], capture_output=True, check=False)


def cut(machines: Machines) -> None:
    _ip("-n", machines.prefixes[1][-1], "link", "set", machines.cable, "down")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Ended:
    """How the first machine's command ended after the second one's process was killed."""

    code: int
    output: str
    killed: int

    @property
    def sentence(self) -> str:
        """What begins the line that names the killed process."""
        return f"watchdog: rank 1 (pid {self.killed} on {socket.gethostname()}) died"


def train_until_one_is_killed(
    machines: Machines,
    command: Callable[[int, str, int], Sequence[str | os.PathLike[str]]],
    folder: Path,
    outs: Sequence[Path],
    ready: Callable[[], bool],
    *,
    env: Callable[[int, str, int], Mapping[str, str]] = lambda *_: {},
    cwd: Path,
    within: float = 20.0,
) -> Ended:
    """Start `command(machine, first's address, port)` on both; when `ready`, kill the second's.

    Logs go to `folder`; `outs` are removed before a second attempt; the first must end `within` s.
    """
    for attempt in (1, 2):
        port = free_port()
        for out in outs:
            shutil.rmtree(out, ignore_errors=True)
        jobs = [
            machines.popen(
                number,
                command(number, machines.address, port),
                folder / f"machine{number}.log",
                env=env(number, machines.address, port),
                cwd=cwd,
            )
            for number in (0, 1)
        ]
        try:
            if not _wait(ready, jobs, folder):
                # About 1 of 100 starts of oneflow 0.9.0 hangs.
                logs = "".join(log.read_text() for log in sorted(folder.glob("machine*.log")))
                assert attempt == 1, f"not under way within two minutes, twice: {logs}"
                continue
            victim = training_process(jobs[1].pid)
            os.kill(victim, signal.SIGKILL)
            code = jobs[0].wait(within)
            return Ended(code, (folder / "machine0.log").read_text(), victim)
        finally:
            for job in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    raise AssertionError("unreachable")


def _wait(ready: Callable[[], bool], jobs: list[subprocess.Popen[bytes]], folder: Path) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for number, job in enumerate(jobs):
            text = f"machine {number} ended with {job.poll()}:\n"
            assert job.poll() is None, text + (folder / f"machine{number}.log").read_text()
        if ready():
            return True
        time.sleep(0.05)
    return False


def training_process(launcher: int) -> int:
    """The process of a job that a launcher of one process has started."""
    for _ in range(5):
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for child in children:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if b"RANK=1" in environment:
                return int(child)
        # A shell, or `ip netns exec`, that has not become the launcher.
        launcher = int(children[0])
    raise AssertionError(f"no process of rank 1 below {launcher}")
