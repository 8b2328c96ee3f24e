"""Worker processes: `WorkerPool` fills batches of arrays in shared memory, `OrderedPool` applies a
function to a stream of items.

Why not `oneflow.utils.data.DataLoader`: it works and notices a killed worker, but it pickles every
batch through a pipe, which the training process unpickles while it should be computing (8 batches
of 192 images of 224 x 224: 2.0 s of its time, here 0.1 s), it gives whole batches to single
workers, so that the first batch takes as long as one process needs for it, and it starts new
processes each epoch. Here a batch is cut into chunks that all workers share, and only row numbers
travel through pipes.

Workers are forked, so they need not import oneflow again (under a launcher that import would join
the job's rendezvous). They must not run oneflow operations; reading, PIL and numpy are safe.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import mmap
import multiprocessing
import os
import signal
import struct
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from oneflow_accel.errors import DataError

import numpy as np

# Batches in the making while the training process computes; one slot of shared memory each.
_PREFETCH = 3
# More chunks than workers, so that a slow image does not leave the other workers idle.
_CHUNKS_PER_WORKER = 4
# A task: batch number, slot, its first row there, epoch, first position in it, number of rows.
# A pipe keeps records of less than PIPE_BUF (4096) bytes together, so each is read whole.
_TASK = struct.Struct("<6q")

logger = logging.getLogger("oneflow_accel")

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class FilledRows:
    """Per row the index of the sample it holds (-1: none), and the unreadable samples with the
    reason."""

    indices: list[int]
    bad: dict[int, str]


# (epoch, first position in the epoch, array of shape (rows, *sample)) -> FilledRows
FillRows = Callable[[int, int, np.ndarray], FilledRows]


class WorkerPool:
    """Processes that live as long as the pool and fill batches ahead of their use. `fill` fills
    rows in place, and the same call must give the same rows in any process; `rows` is the largest
    number of rows in a batch, each float32 of `sample_shape`."""

    def __init__(
        self, workers: int, fill: FillRows, rows: int, sample_shape: Sequence[int]
    ) -> None:
        # Anonymous shared memory: it has no name to clean up and no limit from /dev/shm.
        elements = _PREFETCH * rows * math.prod(sample_shape)
        memory = mmap.mmap(-1, max(elements, 1) * np.dtype(np.float32).itemsize)
        self._slots = np.frombuffer(memory, dtype=np.float32, count=elements).reshape(
            _PREFETCH, rows, *sample_shape
        )
        self._chunk = math.ceil(rows / (_CHUNKS_PER_WORKER * workers))
        self._waiting: dict[int, int] = {}  # batch number -> rows not yet reported
        self._reports: dict[int, dict[int, FilledRows]] = {}  # batch number -> first row -> report
        self._submitted = 0
        task_reader, self._task_writer = os.pipe()
        self._processes = []
        self._results: dict[Connection, int] = {}  # -> position in _processes
        context = multiprocessing.get_context("fork")
        for position in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work,
                args=(
                    os.getpid(),
                    task_reader,
                    sender,
                    (self._task_writer, receiver),
                    fill,
                    self._slots,
                ),
                name=f"data-worker-{position}",
                daemon=True,
            )
            process.start()
            sender.close()
            self._processes.append(process)
            self._results[receiver] = position
        os.close(task_reader)
        # Before multiprocessing's own end, which waits for workers that heed no SIGTERM.
        atexit.register(_close, weakref.ref(self))

    def batches(
        self, epoch: int, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[np.ndarray, FilledRows]]:
        """Fill batches and yield them in order; `ranges` has for each the first position in the
        epoch and the number of rows. DataError if a worker died; RuntimeError with the worker's
        traceback if `fill` raised."""
        # An iteration that was left early has ordered batches that workers still write into the
        # slots.
        while self._waiting:
            self._receive()
        self._reports.clear()
        first = self._submitted
        for number in range(first, first + len(ranges)):
            while self._submitted < min(number + _PREFETCH, first + len(ranges)):
                self._submit(epoch, *ranges[self._submitted - first])
            while number in self._waiting:
                self._receive()
            reports = self._reports.pop(number)
            indices: list[int] = []
            bad: dict[int, str] = {}
            for row in sorted(reports):
                indices += reports[row].indices
                bad |= reports[row].bad
            # A copy leaves the slot free however long the caller keeps the batch.
            yield self._slots[number % _PREFETCH, : len(indices)].copy(), FilledRows(indices, bad)

    def close(self) -> None:
        if self._task_writer < 0:
            return
        os.close(self._task_writer)
        self._task_writer = -1
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=5)
        for result in self._results:
            result.close()

    def _submit(self, epoch: int, start: int, rows: int) -> None:
        number = self._submitted
        self._submitted += 1
        self._waiting[number] = rows
        self._reports[number] = {}
        for row in range(0, rows, self._chunk):
            count = min(self._chunk, rows - row)
            task = _TASK.pack(number, number % _PREFETCH, row, epoch, start + row, count)
            os.write(self._task_writer, task)

    def _receive(self) -> None:
        """Wait for a worker to report, and note down all reports that are there."""
        sentinels = [process.sentinel for process in self._processes]
        ready = wait([*self._results, *sentinels])
        for item in ready:
            if not isinstance(item, Connection):
                continue
            try:
                number, row, outcome = item.recv()
            except (EOFError, OSError):
                self._raise_dead(self._results[item])
            if isinstance(outcome, str):
                self.close()
                raise RuntimeError(f"reading a sample failed in a data worker:\n{outcome}")
            self._reports[number][row] = outcome
            self._waiting[number] -= len(outcome.indices)
            if self._waiting[number] == 0:
                del self._waiting[number]
        for position, sentinel in enumerate(sentinels):
            if sentinel in ready:
                self._raise_dead(position)

    def _raise_dead(self, position: int) -> None:
        error = _death("data", self._processes[position], "fewer workers or a smaller batch")
        self.close()
        raise error


def _close(pool: weakref.ref[WorkerPool]) -> None:
    found = pool()
    if found is not None:
        found.close()


def _work(
    parent: int,
    tasks: int,
    results: Connection,
    parent_ends: tuple[int, Connection],
    fill: FillRows,
    slots: np.ndarray,
) -> None:
    """A worker process: fill rows until the task pipe closes or the parent dies."""
    # A cluster sends it to all processes. A training process that has a handler for it still needs
    # its data, and ends its workers itself.
    _begin(ignore_sigterm=callable(signal.getsignal(signal.SIGTERM)))
    task_writer, receiver = parent_ends
    os.close(task_writer)
    receiver.close()
    # The pipe may still hold many tasks when the parent dies.
    while (record := os.read(tasks, _TASK.size)) and os.getppid() == parent:
        number, slot, row, epoch, start, count = _TASK.unpack(record)
        outcome: FilledRows | str
        try:
            outcome = fill(epoch, start, slots[slot, row : row + count])
        except Exception:
            outcome = traceback.format_exc()
        try:
            results.send((number, row, outcome))
        except BrokenPipeError:
            return


class OrderedPool(Generic[T, R]):
    """Applies `function` in forked processes, in order and with bounded memory; with 1 worker or
    fewer in this process.

    `multiprocessing.Pool.imap` reads its whole input at once and hangs if a worker is killed;
    `concurrent.futures` forks while its own threads run. Here worker k gets the items k, k + n,
    ..., one at a time, so that nothing piles up and a pipe is never full from both sides. Make it
    before any thread is started.
    """

    def __init__(self, function: Callable[[T], R], workers: int, name: str) -> None:
        self._function, self._name = function, name
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("fork")
        for _ in range(workers if workers > 1 else 0):
            ours, theirs = context.Pipe()
            arguments = function, theirs, [*self._pipes, ours]
            process = context.Process(target=_apply, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> OrderedPool[T, R]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def map(self, items: Iterable[T]) -> Iterator[R]:
        """Results in the order of the items; takes at most one item per worker ahead. DataError if
        a worker was killed; RuntimeError with the worker's traceback if `function` raised."""
        if not self._pipes:
            yield from map(self._function, items)
            return
        sent = received = 0
        for item in items:
            worker = sent % len(self._pipes)
            results = [self._receive(worker)] if sent >= len(self._pipes) else []
            try:
                self._pipes[worker].send(item)
            except (BrokenPipeError, ConnectionResetError):
                raise self._death(worker) from None
            sent, received = sent + 1, received + len(results)
            yield from results
        for number in range(received, sent):
            yield self._receive(number % len(self._pipes))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
        self._pipes.clear()
        self._processes.clear()

    def _receive(self, worker: int) -> R:
        try:
            fine, result = self._pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            raise self._death(worker) from None
        if not fine:
            raise RuntimeError(f"a {self._name} worker failed:\n{result}")
        return result

    def _death(self, worker: int) -> DataError:
        return _death(self._name, self._processes[worker], "fewer workers")


def _apply(function: Callable[[T], R], pipe: Connection, others: list[Connection]) -> None:
    """A worker of OrderedPool: apply the function until the pipe closes, also by the parent's
    death."""
    _begin(ignore_sigterm=False)
    # Copies of the parent's ends would keep the pipes open when the parent is gone.
    for other in others:
        other.close()
    while True:
        outcome: tuple[bool, Any]
        try:
            item = pipe.recv()
            try:
                outcome = (True, function(item))
            except Exception:
                outcome = (False, traceback.format_exc())
            pipe.send(outcome)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _begin(*, ignore_sigterm: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_sigterm else signal.SIG_DFL)
    # Never collect what was inherited: oneflow objects must not be destroyed in this process.
    gc.freeze()
    warnings.simplefilter("ignore")


def _death(name: str, process: BaseProcess, remedy: str) -> DataError:
    process.join(timeout=5)
    code = process.exitcode
    how = f"exited with code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    return DataError(
        f"{name} worker {process.pid} {how}. If the machine ran out of memory (see dmesg), use "
        f"{remedy}"
    )
