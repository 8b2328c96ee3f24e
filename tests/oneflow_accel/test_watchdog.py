"""The end of one process ends the others, which say whose end it was.

They are started here: oneflow's launcher takes others down itself where it leads their group.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from oneflow_accel import settings, watchdog

import pytest

from tests.launch import REPOSITORY, free_port
from tests.machines import cut, two_machines

PROGRAM = Path(__file__).with_name("watched_job.py")


@dataclass
class Ended:
    code: int
    output: str
    when: float


def run_job(folder: Path, nproc: int, what: str, rank: int) -> list[Ended]:
    """Exit code, output and time of the end of each process; one hang in rendezvous is retried."""
    for _ in range(2):
        port = str(free_port())
        processes = []
        for number in range(nproc):
            env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": port, "WORLD_SIZE": str(nproc), "OMP_NUM_THREADS": "1"}
            env |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, PROGRAM, folder, what, str(rank)],
                    env=env,
                    stdout=(folder / f"{number}.log").open("w"),
                    stderr=subprocess.STDOUT,
                )
            )
        try:
            ends = {}
            deadline = time.monotonic() + 40
            while len(ends) < nproc and time.monotonic() < deadline:
                for number, process in enumerate(processes):
                    if number not in ends and process.poll() is not None:
                        text = (folder / f"{number}.log").read_text()
                        ends[number] = Ended(process.returncode, text, time.time())
                time.sleep(0.05)
            if len(ends) == nproc:
                return [ends[number] for number in range(nproc)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    raise AssertionError("hung twice: " + "".join(p.read_text() for p in folder.glob("*.log")))


@pytest.mark.parametrize(("nproc", "rank"), [(3, 1), (2, 0)])
def test_killed_process(tmp_path: Path, nproc: int, rank: int) -> None:
    ends = run_job(tmp_path, nproc, "kill", rank)
    died = float((tmp_path / "when").read_text())
    pid = (tmp_path / "pid").read_text()
    name = f"rank {rank} (pid {pid} on {socket.gethostname()})"
    assert ends[rank].code == -9
    for number, end in enumerate(ends):
        if number != rank:
            assert end.code == watchdog.EXIT_CODE, end.output
            assert end.when - died < 5
            lines = [line for line in end.output.splitlines() if line.startswith("watchdog:")]
            assert len(lines) == 1, end.output
            assert f"{name} died" in lines[0]
            assert f"; rank {number} (pid " in lines[0]
            assert "this line is in the buffer" in end.output


def test_exception_in_one_process(tmp_path: Path) -> None:
    rank = 0
    ends = run_job(tmp_path, 2, "raise", rank)
    raised = float((tmp_path / "when").read_text())
    name = f"rank {rank} (pid {(tmp_path / 'pid').read_text()} on {socket.gethostname()})"
    failed, other = ends[rank], ends[1 - rank]
    # 1, or an abort of oneflow's own shutdown, which misses the peer.
    assert failed.code != 0
    assert "ValueError: a bad batch" in failed.output
    assert "watchdog:" not in failed.output
    assert other.code == watchdog.EXIT_CODE
    assert f"watchdog: {name} failed (ValueError: a bad batch)" in other.output
    assert other.when - raised < watchdog.GRACE + 3


def test_all_finish(tmp_path: Path) -> None:
    ends = run_job(tmp_path, 2, "finish", 1)
    assert [end.code for end in ends] == [0, 0]
    assert not any("watchdog" in end.output for end in ends)
    # Rank 0 watches until the last one is done.
    first, last = (float((tmp_path / f"{rank}.done").read_text()) for rank in (0, 1))
    assert first > last - 0.5


@pytest.mark.parametrize("attempt", range(5))
def test_strangers_are_sent_away(attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two watchdogs in one process, strangers on their port, often: goodbyes and closes race."""
    exits: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", exits.append)
    port = free_port()
    told: dict[int, object] = {}
    complete = threading.Barrier(2)

    def exchange(rank: int, value: object) -> list[object]:
        told[rank] = value
        complete.wait(10)
        if rank == 1:
            for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "token": "guessed"}\n'):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(text)
        return [told[0], told[1]]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: watchdog.Watchdog(
                rank, 2, partial(exchange, rank), "localhost", port if rank == 0 else 0
            ),
            (0, 1),
        )
        assert [peer.rank for peer in first._peers] == [0, 1]
        waiting = pool.submit(first.stop)
        time.sleep(0.02)
        assert not waiting.done()
        second.stop()
        waiting.result(timeout=10)
        time.sleep(0.02)
    assert not exits


def test_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog.distributed, "world_size", lambda: 2)
    monkeypatch.setenv(settings.WATCHDOG.name, "off")
    watchdog.start()
    assert watchdog._active is None


def test_one_process_needs_none() -> None:
    with watchdog.guard():
        assert watchdog._active is None
    watchdog.start()
    watchdog.stop()
    with pytest.raises(ValueError, match="as it was"), watchdog.guard():
        raise ValueError("as it was")


# One side of a connection; the sides tell each other who they are by files.
SIDE = """
import json, sys, time
from pathlib import Path
from oneflow_accel import watchdog

folder, rank, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def exchange(value):
    (folder / f"{rank}.new").write_text(json.dumps(value))
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")
    files = [folder / "0.json", folder / "1.json"]
    while not all(file.exists() for file in files):
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]

# Soon, so that a test can wait for it.
watchdog._PROBES = (1, 1, 2)
watchdog.Watchdog(rank, 2, exchange, address)
(folder / f"{rank}.ready").touch()
time.sleep(60)
"""


def test_a_cut_link_is_not_called_a_death(tmp_path: Path) -> None:
    with two_machines("namespaces") as machines:
        sides = [
            machines.popen(
                rank,
                [sys.executable, "-c", SIDE, tmp_path, str(rank), machines.address],
                tmp_path / f"{rank}.log",
                env={},
                cwd=tmp_path,
            )
            for rank in (0, 1)
        ]
        try:
            deadline = time.monotonic() + 60
            while not all((tmp_path / f"{rank}.ready").exists() for rank in (0, 1)):
                assert time.monotonic() < deadline, (tmp_path / "0.log").read_text()
                time.sleep(0.05)
            cut(machines)
            assert [side.wait(20) for side in sides] == [watchdog.EXIT_CODE] * 2
        finally:
            for side in sides:
                side.kill()
                side.wait()
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.log").read_text()
        assert f"watchdog: rank {1 - rank} (pid " in said
        assert "is out of reach: its machine or the network went down" in said
        assert "died" not in said
