"""Lets the processes of a job meet without the pause that oneflow makes.

While oneflow is imported, every process calls rank 0. One that comes before rank 0 listens tries
again only after 10 s (`LoadServer` in oneflow 0.9.0's core/control/rpc_client.cpp), and of
processes that start together about every second one does. So the others wait here until somebody
listens, and are some hundredths of a second late at most.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Below the ports that Linux gives to outgoing connections (32768 to 60999): between the moment in
# which one of those is found free and the moment in which rank 0 binds it, some seconds of imports
# later, any connection of any process may be given it, even one that asks whether rank 0 listens
# yet. Oneflow then aborts.
_FREE_PORTS = range(15000, 32768)
# Seconds; after it oneflow's own way of waiting begins.
MOST_SECONDS = 60.0
_PAUSE = 0.05


def free_port() -> int:
    """A TCP port of the loopback interface on which nobody listens, for a job to meet at.

    OSError where a hundred ports are taken.
    """
    for port in random.SystemRandom().sample(_FREE_PORTS, 100):
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports of the loopback interface are taken")


def wait_for_rank_zero(
    environment: Mapping[str, str] = os.environ, most_seconds: float = MOST_SECONDS
) -> bool:
    """Wait until rank 0 listens at MASTER_ADDR:MASTER_PORT; only where this is another process of a
    job.

    False where nobody listened in that time; True otherwise, and where there is nobody to wait for.
    What is wrong with the variables is oneflow's to say.
    """
    try:
        rank, world_size, port = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        )
        address = environment["MASTER_ADDR"]
    except (KeyError, ValueError):
        return True
    if not 0 < rank < world_size or not 0 < port < 65536:
        return True
    deadline = time.monotonic() + most_seconds
    while not _listens(address, port):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
    return True


def number_on_this_machine(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set LOCAL_RANK to what oneflow takes it for, where several launchers share this machine.

    At a loopback address all processes are on this machine. Oneflow counts them through then, and
    aborts in the first collective of a process whose launcher has begun at 0 again.
    """
    if environment.get("MASTER_ADDR") in LOOPBACK and environment.get("RANK", "").isdecimal():
        environment["LOCAL_RANK"] = environment["RANK"]


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0) as connection:
            # A connection to a free port of this machine can meet itself.
            return connection.getsockname() != connection.getpeername()
    except OSError:
        return False
