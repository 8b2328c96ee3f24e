"""Several processes doing the same generation: rank 0 decides, the others follow.

Only rank 0 hears of requests, clocks and people who went away, so it shares each request before it
is run (`agree.on_rank_0`), and whether to go on before each token.

A request that fails on one rank (no memory, say) must fail on all before the next one begins. So
while a request runs, nothing is collective but the model's own steps and `exchange`, before each
step and at the end. A rank that fails between them says so in the next `exchange` (`in_step` sees
to it), and all give up there. A rank that fails inside a step leaves the others in the middle of a
collective, where nobody can be told anything: it ends, and the watchdog ends the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

# A collective that one rank enters late fails after 300 s (ONEFLOW_TIMEOUT_SECONDS), so an idle
# rank 0 must speak more often than that.
HEARTBEAT_SECONDS = 20.0
# How long an orderly end may take after a signal.
GRACE_SECONDS = 20.0


class OutOfStepError(Exception):
    """A rank failed inside a collective: the ranks cannot be kept together any longer."""


class OtherRankError(Exception):
    """The request failed on another rank; the text says on which and why."""


class OtherRankUserError(OtherRankError, UserError):
    """The same, for an error that the user can mend."""


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """A request, entered by every rank: where it fails on one, it fails on all, with OtherRankError
    or OtherRankUserError on those without an error of their own.

    No collective may be in it but `exchange` and what raises OutOfStepError where it fails.
    """
    try:
        yield
        exchange()
    except (OtherRankError, OutOfStepError):
        raise
    except Exception as error:
        if distributed.world_size() > 1:
            _sum(1.0, 0.0)
            _gather_problems(error)
        raise


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """What all ranks do together: where one fails, they cannot be kept together."""
    try:
        yield
    except Exception as error:
        if distributed.world_size() == 1:
            raise
        raise OutOfStepError(f"{type(error).__name__}: {error}") from error


def exchange(value: float = 0.0) -> float:
    """The sum of `value` over the ranks, which all call it inside `in_step`; raises the same."""
    if distributed.world_size() == 1:
        return value
    failures, total = _sum(0.0, value)
    if failures:
        raise _gather_problems(None)
    return total


def _sum(failures: float, value: float) -> list[float]:
    try:
        return distributed.all_reduce_sum([failures, value])
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise OutOfStepError(f"the processes lost touch: {reason}") from error


def _gather_problems(error: Exception | None) -> OtherRankError:
    """Tell the others about this rank's `error`, and hear theirs."""
    own = None
    if error is not None:
        users = isinstance(error, UserError)
        text = str(error) if users else f"{type(error).__name__}: {error}".partition("\n")[0]
        own = {"users": users, "text": text}
    problems = distributed.all_gather_json(own)
    rank, problem = next((rank, each) for rank, each in enumerate(problems) if each is not None)
    kind = OtherRankUserError if problem["users"] else OtherRankError
    return kind(f"rank {rank}: {problem['text']}")


def end_on_signal() -> None:
    """End in order after SIGINT or SIGTERM, or without order after a while; for several processes.

    Rank 0 answers a signal by ending the job; a rank that went at once would leave it in the middle
    of a collective, so the others wait for it. A thread sees to it that all end, because Python's
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
