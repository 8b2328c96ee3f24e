"""Several processes doing the same generation: rank 0 decides, the others follow.

Every rank has to make the same calls of the model in the same order, and only rank 0 hears of
requests, clocks and people who went away. So rank 0 shares each request before it is run, and
whether to go on before each token.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.training import distributed

from libai_projects.engine.checks import agree

# A collective that one rank enters late fails after 300 s (ONEFLOW_TIMEOUT_SECONDS), so an idle
# rank 0 must speak more often than that.
HEARTBEAT_SECONDS = 20.0
# How long an orderly end may take after a signal.
GRACE_SECONDS = 20.0
# linux/prctl.h
_PR_SET_PDEATHSIG = 1


def share(value: Any) -> Any:
    """Rank 0's `value` (anything JSON can say), on every rank; every rank has to call it."""
    return distributed.all_gather_json(value if distributed.is_main() else None)[0]


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank; every rank has to call it."""
    if distributed.world_size() == 1:
        return flag
    return distributed.all_reduce_sum([float(flag)])[0] > 0


def together(action: Callable[[], Any]) -> Any:
    """Run `action` on every rank; if it is a UserError on any, it is one on all.

    Without it a rank that fails alone would leave the others waiting for it.

    Returns:
        what `action` returned on this rank.

    Raises:
        UserError: it names the ranks, where it is not all.
    """
    result, problems = None, []
    try:
        result = action()
    except UserError as error:
        problems.append(str(error))
    agree(problems)
    return result


def launched() -> bool:
    """Whether oneflow's launcher started this process; without it oneflow sets the rank to -1."""
    return os.environ.get("RANK", "-1") != "-1"


def end_with_launcher() -> None:
    """Get SIGTERM when the launcher that started this process ends, on Linux.

    Oneflow 0.9.0's launcher passes signals on only where it leads its process group; started by
    a script it would end and leave a server behind.
    """
    if not launched() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        # It had ended before it was asked for.
        os.kill(os.getpid(), signal.SIGTERM)


def end_on_signal() -> None:
    """End in order after SIGINT or SIGTERM, or without order after a while; for several processes.

    A terminal sends Ctrl-C to every rank, and the launcher SIGTERM. Rank 0 has handlers of its own
    and answers by ending the job; a rank that went at once would leave it in the middle of a
    collective, so the others wait for it. A thread sees to it that all end, because Python's
    handlers do not run while the main thread waits in oneflow for a rank that is gone.
    """
    if distributed.world_size() == 1:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if not distributed.is_main():
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-on-signal").start()
