"""Ends all processes of a job when one of them dies, and says which one it was.

A process that is killed in the middle of a step leaves its peers in a collective that never ends,
and oneflow.distributed.launch does not always take them down. Here a thread in each process keeps
one TCP connection to rank 0; a connection that closes without a goodbye is a death, which rank 0
tells the others. The system closes the connections of a process however it ends, and its host's
silence shows after some 30 s.

    with watchdog.guard():
        train()

OneFlow's collectives release Python's lock while they wait, so the thread runs.

The environment variable ONEFLOW_ACCEL_WATCHDOG, the same for all processes, is `off` for none of
this, or the number of a port for rank 0 to listen on where a firewall lets only some through;
otherwise the system chooses one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from oneflow_accel import distributed, launched, machine, settings
from oneflow_accel.errors import UserError
from oneflow_accel.rendezvous import LOOPBACK

EXIT_CODE = 1
# A failure often shows in several processes at once; each gets so long to report its own, in s.
GRACE = 3.0
_CONNECT_TIMEOUT = 60.0
_OUT_OF_REACH = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
# When a host counts as silent: idle time, time between probes, in s; their number.
_PROBES = (10, 5, 4)
_ENDS = {
    "failed": "failed ({text})",
    "lost": "is out of reach: its machine or the network went down",
    "closed": "died: killed, out of memory or crashed",
    "out": "was killed by its system, whose memory ran out: take a smaller batch",
}
_ADVICE = f"set {settings.WATCHDOG.name} to a port that is open between the hosts, or to off"


@dataclass(frozen=True)
class Peer:
    """A process of the job."""

    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Watchdog:
    """The connections of one process.

    `exchange` gives every process the list of what each of them passed, by rank; `address` is rank
    0's machine, as the others reach it, where it listens on `port`, 0 for any. UserError if the
    port cannot be had, or a process did not connect within a minute.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: Callable[[Any], list[Any]],
        address: str,
        port: int = 0,
    ) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        # Ranks whose end is known: they said goodbye, or failed and said so.
        self._gone: set[int] = set()
        self._all_gone = threading.Event()
        self._stopped = threading.Event()
        self._ending = False
        self._kills = machine.memory_kills()
        me = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        if rank == 0:
            listener = _listen(address, port)
            token = secrets.token_hex(16)
            told = exchange({**me, "port": listener.getsockname()[1], "token": token})
        else:
            told = exchange(me)
        self._peers = [Peer(entry["rank"], entry["pid"], entry["host"]) for entry in told]
        # For each connection the lines that come, read by a thread of its own.
        self._connections: dict[int, tuple[socket.socket, TextIO]] = {}
        if rank == 0:
            with listener:
                _accept(listener, token, self._peers[1:world_size], self._connections)
        else:
            self._connections[0] = _connect(address, told[0]["port"], told[0]["token"], rank)
        for peer, (connection, lines) in self._connections.items():
            connection.setblocking(True)
            arguments = (peer, lines)
            threading.Thread(
                target=self._watch, args=arguments, name="watchdog", daemon=True
            ).start()

    def stop(self, failure: str | None = None) -> None:
        """Say goodbye; rank 0 waits for the goodbyes of all others, and watches them until then.
        With a failure the others are told and end as well."""
        if self._stopped.is_set():
            return
        if self._rank == 0 and failure is None:
            self._all_gone.wait()
        # Before the goodbye: on the last one rank 0 closes the connections, which is not a death.
        self._stopped.set()
        if self._rank != 0 or failure is not None:
            self._tell("bye" if failure is None else "failed", self._rank, failure or "")
        self.close()

    def close(self, *, in_child: bool = False) -> None:
        """Close the connections of this process; without a goodbye the others take it for dead."""
        for connection, _ in self._connections.values():
            if in_child:
                # The parent has them too, and goes on.
                os.close(connection.detach())
                continue
            # Wakes the thread that reads; closed by the peer already, perhaps.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _watch(self, rank: int, lines: TextIO) -> None:
        end = "closed"
        try:
            for line in lines:
                if self._stopped.is_set():
                    return
                message = json.loads(line)
                self._handle(message["event"], message["rank"], message["text"])
        except OSError as error:
            # The system of a process that ended would have said so.
            end = "lost" if error.errno in _OUT_OF_REACH else end
        # Half a line, or `stop` has closed the connection.
        except ValueError:
            pass
        if not self._stopped.is_set():
            self._handle(end, rank, "")

    def _handle(self, event: str, rank: int, text: str) -> None:
        with self._lock:
            if self._ending:
                return
            if event == "bye" or rank in self._gone:
                self._gone.add(rank)
                if len(self._gone) == len(self._peers) - 1:
                    self._all_gone.set()
                return
            self._gone.add(rank)
            self._ending = True
        if event == "closed" and self._peers[rank].host == socket.gethostname():
            event = event if machine.memory_kills() == self._kills else "out"
        line = f"{self._peers[rank]} {_ENDS[event].format(text=text)}"
        delay = GRACE if event == "failed" else 0.0
        if self._rank == 0:
            self._tell(event, rank, text)
        threading.Thread(target=self._end, args=(line, delay), daemon=True).start()

    def _end(self, line: str, delay: float) -> None:
        """End this process, unless it ends by itself within `delay` seconds."""
        time.sleep(delay)
        if self._stopped.is_set():
            return
        text = f"watchdog: {line}; {self._peers[self._rank]} ends as well"
        for say in _last_words:
            with contextlib.suppress(Exception):
                # The launcher has noticed, too, and may end this process meanwhile.
                os.write(2, f"{text}\n".encode())
                say(line)
            text = ""
        # The launcher that one process of a machine ends takes the others along, so that those
        # wait for a moment only.
        launched.end(text, EXIT_CODE, let_speak=0.3)

    def _tell(self, event: str, rank: int, text: str) -> None:
        line = json.dumps({"event": event, "rank": rank, "text": text}).encode() + b"\n"
        for peer, (connection, _) in self._connections.items():
            if peer != rank:
                # It is gone itself, and there is nobody to tell.
                with contextlib.suppress(OSError):
                    connection.sendall(line)


def _listen(address: str, port: int) -> socket.socket:
    """Nobody beyond this machine has to reach a job that is all on it."""
    try:
        return socket.create_server(("127.0.0.1" if address in LOOPBACK else "", port))
    except OSError as error:
        raise UserError(
            f"the watchdog cannot listen on port {port}: {error.strerror}; set "
            f"{settings.WATCHDOG.name} to another one"
        ) from error


def _accept(
    listener: socket.socket,
    token: str,
    expected: list[Peer],
    connections: dict[int, tuple[socket.socket, TextIO]],
) -> None:
    """Add one connection for each of the expected peers; a stranger's is dropped."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT
    while len(connections) < len(expected):
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection, _ = listener.accept()
            connection.settimeout(10)
            lines = connection.makefile()
            hello = json.loads(lines.readline(1000))
            if hmac.compare_digest(str(hello["token"]), token):
                _keep_alive(connection)
                connections[int(hello["rank"])] = (connection, lines)
                continue
        if time.monotonic() >= deadline:
            absent = ", ".join(str(peer) for peer in expected if peer.rank not in connections)
            raise UserError(f"the watchdog got no connection from {absent}; {_ADVICE}")


def _connect(address: str, port: int, token: str, rank: int) -> tuple[socket.socket, TextIO]:
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT)
    except OSError as error:
        raise UserError(
            f"rank {rank} cannot reach the watchdog of rank 0 at {address}, port {port}: "
            f"{error}; {_ADVICE}"
        ) from error
    _keep_alive(connection)
    connection.sendall(json.dumps({"rank": rank, "token": token}).encode() + b"\n")
    return connection, connection.makefile()


def _keep_alive(connection: socket.socket) -> None:
    """Notice a host that has gone silent."""
    idle, between, count = _PROBES
    tcp = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: idle,
        socket.TCP_KEEPINTVL: between,
        socket.TCP_KEEPCNT: count,
        socket.TCP_USER_TIMEOUT: 1000 * (idle + between * count),
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in tcp.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


_active: Watchdog | None = None
_last_words: list[Callable[[str], None]] = []


@contextlib.contextmanager
def last_words(say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, call `say` before this process ends because of another one, with a line
    that says of which and why; in a thread of the watchdog's."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def is_on() -> bool:
    """Whether a job of several processes is watched, as far as the environment has a say in it."""
    return settings.WATCHDOG.get() != "off"


def start() -> None:
    """Begin to watch the job's processes; every process has to call it. Nothing on one process.

    Raises:
        RuntimeError: it has been started already.
        UserError: a process did not connect within a minute.
    """
    global _active
    if not is_on() or distributed.world_size() == 1:
        return
    if _active is not None:
        raise RuntimeError("the watchdog has been started already")
    setting = settings.WATCHDOG.get()
    _active = Watchdog(
        distributed.rank(),
        distributed.world_size(),
        distributed.all_gather_json,
        # The machine of rank 0, by the launcher; OneFlow itself cannot do without it.
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        0 if setting == "on" else int(setting),
    )


def stop(failure: str | None = None) -> None:
    """End the watch; without a `failure` this is a goodbye, with one the other processes end too.

    Rank 0 waits until all others have stopped. Nothing if it has not been started.
    """
    global _active
    watchdog, _active = _active, None
    if watchdog is not None:
        watchdog.stop(failure)


def is_watching() -> bool:
    """Whether a block is guarded now; always False in a job of one process."""
    return _active is not None


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Watch while the block runs. If it raises in one process, the others end within `GRACE` s.

    A process that ends because of another exits with EXIT_CODE, after one line on stderr that names
    rank, pid and host of that one.
    """
    start()
    try:
        yield
    except SystemExit as error:
        stop(None if error.code in (None, 0) else f"exit code {error.code}")
        raise
    except BaseException as error:
        text = str(error).partition("\n")[0]
        stop(f"{type(error).__name__}: {text}" if text else type(error).__name__)
        raise
    stop()


def _stop_at_exit() -> None:
    """A process that ends without `stop` has not finished; its traceback, if any, says why."""
    error = getattr(sys, "last_value", None)
    stop("it ended early" if error is None else f"{type(error).__name__}: {error}")


def _close_in_child() -> None:
    """Data workers are forked; a connection that they hold would outlive this process."""
    global _active
    watchdog, _active = _active, None
    if watchdog is not None:
        watchdog.close(in_child=True)


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_close_in_child)
