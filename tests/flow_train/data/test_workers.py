"""The worker processes: killed, failing, abandoned, and forked beside a busy oneflow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from oneflow_accel.errors import DataError

import numpy as np
import psutil
import pytest

from flow_train.data.workers import FilledRows, WorkerPool
from tests.launch import REPOSITORY


def fill_with_position(epoch: int, start: int, rows: np.ndarray) -> FilledRows:
    for offset, row in enumerate(rows):
        row[...] = 1000 * epoch + start + offset
    return FilledRows(list(range(start, start + len(rows))), {})


def fill_slowly(epoch: int, start: int, rows: np.ndarray) -> FilledRows:
    time.sleep(0.05)
    return fill_with_position(epoch, start, rows)


def fail_at_20(epoch: int, start: int, rows: np.ndarray) -> FilledRows:
    if start <= 20 < start + len(rows):
        raise ZeroDivisionError("in the transform")
    return fill_with_position(epoch, start, rows)


@pytest.fixture
def start_pool():
    pools = []

    def start(fill, workers=2, rows=8, shape=(3,)):
        pools.append(WorkerPool(workers, fill, rows, shape))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def alive(pool: WorkerPool) -> list[int]:
    return [process.pid for process in pool._processes if process.is_alive()]


def test_batches_come_in_order_with_their_rows(start_pool):
    pool = start_pool(fill_with_position, workers=3)
    ranges = [(8 * number, 8) for number in range(10)] + [(80, 3)]
    batches = list(pool.batches(2, ranges))
    assert [filled.indices for _, filled in batches] == [list(range(s, s + n)) for s, n in ranges]
    for rows, filled in batches:
        assert rows[:, 0].tolist() == [2000 + index for index in filled.indices]
    assert len(alive(pool)) == 3
    pool.close()
    assert not alive(pool)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_killed_worker_is_an_error_at_once(start_pool, sent):
    pool = start_pool(fill_slowly)
    batches = pool.batches(0, [(0, 8)] * 1000)
    next(batches)
    # Ctrl-C goes to the whole group; the workers leave it to the training process.
    for process in pool._processes:
        os.kill(process.pid, signal.SIGINT)
    assert len([next(batches) for _ in range(4)]) == 4
    os.kill(pool._processes[1].pid, sent)
    started = time.monotonic()
    with pytest.raises(DataError, match=f"was killed by {sent.name}.*out of memory"):
        list(batches)
    assert time.monotonic() - started < 5
    assert not alive(pool)


def test_worker_killed_while_idle_is_noticed(start_pool):
    pool = start_pool(fill_with_position)
    os.kill(pool._processes[0].pid, signal.SIGKILL)
    pool._processes[0].join(10)
    with pytest.raises(DataError, match="SIGKILL"):
        list(pool.batches(0, [(0, 8)] * 3))


def test_failing_code_is_reported_with_its_traceback(start_pool):
    pool = start_pool(fail_at_20)
    with pytest.raises(RuntimeError, match=r"(?s)fail_at_20.*ZeroDivisionError: in the transform"):
        list(pool.batches(0, [(8 * n, 8) for n in range(4)]))
    assert not alive(pool)


PARENT = """
import sys, time
from flow_train.data.workers import FilledRows, WorkerPool
def fill(epoch, start, rows):
    time.sleep(0.02)
    return FilledRows(list(range(len(rows))), {})
pools = [WorkerPool(2, fill, 4000, (1,)) for _ in range(2)]
iterators = [pool.batches(0, [(0, 4000)] * 100) for pool in pools]
for iterator in iterators:
    next(iterator)
print(*[process.pid for pool in pools for process in pool._processes], flush=True)
time.sleep(60)
"""


def test_workers_do_not_outlive_their_parent():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
            assert len(workers) == 4
        finally:
            parent.kill()
        parent.wait(10)
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert alive == []


def test_forks_beside_a_busy_oneflow(start_pool):
    import oneflow as flow

    conv = flow.nn.Conv2d(8, 8, 3)
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            conv(flow.ones(2, 8, 16, 16)).sum().numpy()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(5):
            pool = start_pool(fill_with_position)
            assert len(list(pool.batches(0, [(8 * n, 8) for n in range(5)]))) == 5
            pool.close()
    finally:
        stop.set()
        thread.join(30)
