"""Whether a launcher started this process, and how one of several processes ends with a word.

All processes of a job tend to find the same mistake, and what a launcher adds to their ends is a
traceback of its own. So one process of each machine says what was wrong, then sends the launcher
SIGTERM, on which oneflow.distributed.launch ends without one; where it leads its process group it
takes the other processes along. A process that has something to say and finds that another one is
speaking, or its launcher gone, knows that it has been said.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

# How long the other processes of a machine let its first one speak, in s: less than what
# watchdog.GRACE gives a process to report its own failure.
_LET_SPEAK = 1.0
# How long a launcher may take to end, and a process that its launcher has left.
_MOST_SECONDS = 10.0
# The same, where the process has begun to stop: a checkpoint may have to be written.
SAVE_SECONDS = 120.0
_POLL = 0.02
# What a launcher's command line holds: oneflow's, and ours that stands in for it.
_LAUNCHERS = ("oneflow.distributed.launch", "oneflow_accel.launch", "launch.py")
_PARENT = os.getppid()
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
# Whether this process has noticed that it is to stop, and is about to.
stops = threading.Event()


def launched() -> bool:
    """Whether a launcher started this process. Without one oneflow sets RANK to -1 itself."""
    return os.environ.get("RANK", "-1") != "-1"


def rank() -> int:
    """This process's rank as the launcher says, 0 without one: oneflow would have to reach the
    others first."""
    return _number("RANK")


def orphaned() -> bool:
    """Whether the process that started this one has ended."""
    return os.getppid() != _PARENT


def end_with_launcher() -> None:
    """Get SIGTERM when the launcher that started this process ends, on Linux, and end a little
    later if that does not do it: whoever waits for others in a collective sees no signal.

    Oneflow 0.9.0's launcher passes signals on only where it leads its process group; started by
    a script, or killed, it would end and leave its processes behind.
    """
    launcher = _launcher()
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        # It had ended before it was asked for.
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_outlive_briefly, args=(launcher,), daemon=True).start()


def _outlive_briefly(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(_MOST_SECONDS - 2.0)
    if stops.is_set():
        time.sleep(SAVE_SECONDS)
    os._exit(128 + signal.SIGTERM)


def end(text: str, code: int, *, let_speak: float = _LET_SPEAK) -> NoReturn:
    """End this process, one of several, with a line on stderr ("" for none) that one process of the
    machine says; the others wait for it `let_speak` seconds.

    Python's own end is left out: oneflow waits there for processes that are gone. oneflow's
    launcher ends with 1 whatever the code is; ours with this one.
    """
    launcher = _launcher()
    if launcher is not None and _number("LOCAL_RANK") > 0:
        _wait_for_end_of(launcher, let_speak)
    # A stream may be closed, or have a full disk behind it, and another thread may hold its lock.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    if launcher is None:
        _write(text)
        os._exit(code)
    with socket.socket(socket.AF_UNIX) as floor:
        if os.getppid() == launcher and _takes(floor, launcher):
            _write(text)
            _exits_on_sigterm(code)
            with contextlib.suppress(OSError):
                os.kill(launcher, signal.SIGTERM)
        # Until nobody is left who could take the floor.
        _wait_for_end_of(launcher, _MOST_SECONDS)
        os._exit(code)


def _takes(floor: socket.socket, launcher: int) -> bool:
    """Whether this process is the one that speaks: a name of Linux's abstract kind, which is free
    again when the process ends."""
    try:
        floor.bind(f"\0oneflow_accel launcher {launcher}")
    except OSError:
        return False
    return True


def _exits_on_sigterm(code: int) -> None:
    """A launcher that is told to stop sends its processes the same signal."""
    # Handlers belong to the main thread. Elsewhere the watchdog ends a process, whose code says no
    # more than a signal does, and whose main thread waits for others and would run no handler.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    else:
        ctypes.CDLL(None).signal(signal.SIGTERM, None)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        # One write: processes share the pipe.
        os.write(2, f"{text}\n".encode() if text else b"")


def _launcher() -> int | None:
    """The launcher's process number; None where something else started this process."""
    try:
        command = Path(f"/proc/{_PARENT}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        command = ""
    if not command:
        # It has gone, or has ended and nobody has asked how: nobody is there to be ended, and
        # somebody has spoken.
        return _PARENT if launched() and os.getppid() != _PARENT else None
    words = command.split("\0")
    known = any(word in _LAUNCHERS or Path(word).name in _LAUNCHERS for word in words)
    # A shell may have the same words.
    return _PARENT if known and "python" in Path(words[0]).name else None


def _wait_for_end_of(launcher: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(_POLL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0
