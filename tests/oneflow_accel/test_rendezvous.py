"""Processes of a job wait for rank 0 before oneflow calls it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

from oneflow_accel.rendezvous import wait_for_rank_zero

import pytest

from tests.launch import REPOSITORY, free_port


def environment(port: int, rank: int = 1, **others: str) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", **place, **others}


def test_it_waits_until_somebody_listens() -> None:
    port = free_port()
    listening = threading.Event()
    server = socket.socket()

    def listen() -> None:
        listening.set()
        server.bind(("127.0.0.1", port))
        server.listen()

    timer = threading.Timer(0.3, listen)
    timer.start()
    try:
        assert wait_for_rank_zero(environment(port), most_seconds=20)
        assert listening.is_set()
    finally:
        timer.join()
        server.close()


def test_it_gives_up() -> None:
    started = time.monotonic()
    assert not wait_for_rank_zero(environment(free_port()), most_seconds=0.2)
    assert 0.2 <= time.monotonic() - started < 10


@pytest.mark.parametrize(
    "given",
    [
        {},
        environment(1, rank=0),
        environment(1, WORLD_SIZE="1"),
        environment(0),
        environment(1, RANK="first"),
        {name: text for name, text in environment(1).items() if name != "MASTER_ADDR"},
    ],
    ids=["alone", "rank 0", "one process", "no port", "no number", "no address"],
)
def test_there_is_nobody_to_wait_for(given: dict[str, str]) -> None:
    # Nobody listens at port 1, for which it would wait a minute.
    started = time.monotonic()
    assert wait_for_rank_zero(given)
    assert time.monotonic() - started < 10


def test_importing_the_device_layer_asks_before_oneflow_calls() -> None:
    """The first that comes closes without a word; the second is oneflow and speaks HTTP/2."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(60)
        env = {**os.environ, **environment(server.getsockname()[1]), "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            [sys.executable, "-c", "import oneflow_accel"], env=env, stderr=subprocess.DEVNULL
        )
        try:
            heard = []
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(60)
                    heard.append(connection.recv(14))
            assert heard == [b"", b"PRI * HTTP/2.0"]
        finally:
            process.kill()
            process.wait()
