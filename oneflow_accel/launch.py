"""oneflow.distributed.launch, with an end that is fit to read and leaves no process behind.

Oneflow 0.9.0's launcher ends its processes only where it leads its process group, and a failure
of theirs is a traceback of its own that does not say which rank it was. Its options are the same;
besides them `--master_port auto` takes 12345 or, on one node, any free port: two jobs that start at
the same time would both find 12345 free, and end up in each other's collectives.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from oneflow_accel import command, machine
from oneflow_accel.launched import SAVE_SECONDS
from oneflow_accel.rendezvous import free_port

from oneflow.distributed import launch

DEFAULT_PORT = 12345
# Seconds that the other processes get to end by themselves: to print what they know, then to stop.
_SAY = 5.0
_STOP = 10.0


class Children:
    """The processes of this node, by rank."""

    def __init__(self) -> None:
        self._by_rank: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen:
        """Stand in for subprocess.Popen in oneflow's launcher."""
        child = subprocess.Popen(command, env=env, **options)
        self._by_rank[int(env["RANK"])] = child
        return child

    def failed(self) -> tuple[int, int] | None:
        """Rank and return code of a process that failed; one that a signal ended comes first."""
        codes = sorted((child.poll() or 0, rank) for rank, child in self._by_rank.items())
        ended = [(rank, code) for code, rank in codes if code]
        return ended[0] if ended else None

    def exit_code(self) -> int:
        """The exit code of a process that ended by itself and not well, else 0."""
        return max((child.poll() or 0 for child in self._by_rank.values()), default=0)

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended; False if some have not in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all(child.poll() is not None for child in self._by_rank.values()):
                return True
            time.sleep(0.05)
        return False

    def send(self, number: int) -> None:
        for child in self._by_rank.values():
            if child.poll() is None:
                child.send_signal(number)


def main() -> int:
    children, kills = Children(), machine.memory_kills()
    # What the launcher uses of the module.
    launch.subprocess = SimpleNamespace(
        Popen=children.start, CalledProcessError=subprocess.CalledProcessError
    )
    # It would send SIGTERM to a group that may hold the caller too; `children` does it below.
    launch.os = SimpleNamespace(**{**vars(os), "killpg": lambda group, number: None})
    launch.print = _print_but_killing
    sys.argv[1:] = _with_port(sys.argv[1:])
    failed, patience, status = None, _STOP, 0
    try:
        launch.main()
    except subprocess.CalledProcessError:
        failed = children.failed()
        if failed is not None and failed[1] > 0:
            children.wait(_SAY)
    # A signal: of a process that has said what was wrong (oneflow_accel.launched), or of a user.
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
        failed = children.failed()
        if failed is None or -failed[1] in (signal.SIGINT, signal.SIGTERM):
            failed, patience = None, SAVE_SECONDS
    finally:
        children.send(signal.SIGTERM)
        if not children.wait(patience):
            children.send(signal.SIGKILL)
            children.wait(_STOP)
    if failed is None:
        return children.exit_code() or status
    rank, code = failed
    if code < 0:
        name = signal.Signals(-code).name
        if code == -signal.SIGKILL:
            name += _why_killed(kills)
        print(
            f"launch.py: rank {rank} was ended by {name}; the other processes have been stopped. "
            "Go on from the last checkpoint",
            file=sys.stderr,
        )
        return 128 - code
    return code


def _why_killed(kills: int | None) -> str:
    """What there is to say of a SIGKILL by the count of the kernel's own, which was `kills`."""
    advice = f"memory ran out; {command.SMALLER}"
    now = machine.memory_kills()
    if kills is None or now is None:
        return f" (if nobody sent it: {advice})"
    if now == kills:
        return ""
    # In KiB, of the largest.
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    most = machine.memory() / 2**30
    return f" (a process came to hold {held:.1f} GiB, of {most:.1f} GiB for all: {advice})"


def _print_but_killing(text: str) -> None:
    if not text.startswith(("Killing subprocess", "Main process received")):
        print(text, flush=True)


def _with_port(argv: list[str]) -> list[str]:
    for index, (name, value) in enumerate(itertools.pairwise(argv)):
        if (name, value) == ("--master_port", "auto"):
            one_node = "--nnodes" not in argv or argv[argv.index("--nnodes") + 1] == "1"
            port = free_port() if one_node else DEFAULT_PORT
            return [*argv[: index + 1], str(port), *argv[index + 2 :]]
    return argv


if __name__ == "__main__":
    sys.exit(main())
