"""Processes that apply one function to a stream of items, in order and with bounded memory.

`multiprocessing.Pool.imap` reads its whole input at once and hangs if a worker is killed;
`concurrent.futures` forks while its own threads run. Here worker k gets the items k, k + n, ...,
one at a time, so that nothing piles up and a pipe is never full from both sides.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Generic, TypeVar

from oneflow_accel.errors import DataError

T = TypeVar("T")
R = TypeVar("R")


class WorkerPool(Generic[T, R]):
    """Applies `function` in forked processes; make it before any thread is started.

    Args:
        function: called in the workers, which have a copy of it.
        workers: number of processes; 1 or fewer works in this process.
    """

    def __init__(self, function: Callable[[T], R], workers: int) -> None:
        self._function = function
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        context = multiprocessing.get_context("fork")
        for position in range(workers if workers > 1 else 0):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(function, theirs, [*self._pipes, ours]),
                name=f"text-worker-{position}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> WorkerPool[T, R]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def map(self, items: Iterable[T]) -> Iterator[R]:
        """Results in the order of the items; takes at most one item per worker ahead.

        Raises:
            DataError: a worker was killed.
            RuntimeError: `function` raised; holds the worker's traceback.
        """
        if not self._pipes:
            yield from map(self._function, items)
            return
        sent = received = 0
        for item in items:
            worker = sent % len(self._pipes)
            result = None
            if sent >= len(self._pipes):
                result = self._receive(worker)
            try:
                self._pipes[worker].send(item)
            except (BrokenPipeError, ConnectionResetError):
                self._raise_dead(worker)
            sent += 1
            if result is not None:
                received += 1
                yield result[0]
        for number in range(received, sent):
            yield self._receive(number % len(self._pipes))[0]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
        self._pipes.clear()
        self._processes.clear()

    def _receive(self, worker: int) -> tuple[R]:
        try:
            fine, result = self._pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            self._raise_dead(worker)
        if not fine:
            raise RuntimeError(f"a text worker failed:\n{result}")
        return (result,)

    def _raise_dead(self, worker: int) -> None:
        process = self._processes[worker]
        process.join(timeout=5)
        code = process.exitcode
        how = f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise DataError(
            f"text worker {process.pid} {how}. If the machine ran out of memory (see dmesg), use "
            "fewer --workers"
        )


def _work(function: Callable[[T], R], pipe: Connection, others: list[Connection]) -> None:
    """A worker: apply the function until the pipe closes, as it does when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Never collect what was inherited: oneflow objects must not be destroyed in this process.
    gc.freeze()
    warnings.simplefilter("ignore")
    # Copies of the parent's ends would keep the pipes open when the parent is gone.
    for other in others:
        other.close()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        outcome: tuple[bool, object]
        try:
            outcome = (True, function(item))
        except Exception:
            outcome = (False, traceback.format_exc())
        try:
            pipe.send(outcome)
        except (BrokenPipeError, ConnectionResetError):
            return
