"""Runs the server: the web part in a thread, the model in the main thread, a graceful end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence

from oneflow_accel.errors import UserError

import uvicorn

from libai_projects.inference.connections import AllowedHosts, BoundedProtocol, ConnectionBounds
from libai_projects.inference.jobs import Worker
from libai_projects.inference.requests import Limits
from libai_projects.inference.server import create_app

logger = logging.getLogger("oneflow_accel")

# Connections that are still busy after a signal get this long, in seconds.
SHUTDOWN_SECONDS = 5
# Seconds that a client has for taking the answer, beyond the time for making it.
_TAKE_SECONDS = 15
# Further connections beside those of waiting requests: people at the page, health checks.
_MORE_CONNECTIONS = 256


class Server:
    """A server that listens from its construction on, and answers while `run` runs.

    Port 0 takes a free one; `allowed_hosts` are further names, see `connections.AllowedHosts`.
    Raises UserError where the address cannot be used.
    """

    def __init__(
        self,
        worker: Worker,
        limits: Limits,
        host: str,
        port: int,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        self._worker = worker
        self._closed_at: float | None = None
        hosts = AllowedHosts(host, allowed_hosts)
        self._socket = _listen(host, port)
        bounds = ConnectionBounds(
            head_seconds=limits.arrival_seconds,
            answer_seconds=limits.seconds + limits.arrival_seconds + _TAKE_SECONDS,
            connections=limits.queue + _MORE_CONNECTIONS,
        )
        config = uvicorn.Config(
            create_app(worker, limits, hosts),
            http=functools.partial(BoundedProtocol, bounds=bounds),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; must be called in the main thread. The running request
        then stops at its next token, those that wait get 503; a second signal, a second later, ends
        at once."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        print(f"MagicPrompt is at {self.address} (Ctrl-C ends it)", flush=True)
        self.serve()

    def serve(self) -> None:
        thread = threading.Thread(target=self._run_web, name="web")
        thread.start()
        try:
            self._worker.run()
        finally:
            self._worker.close()
            self._server.should_exit = True
            thread.join(SHUTDOWN_SECONDS + 5)
            self._socket.close()

    def _run_web(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            # Without a server there is nothing left to work for.
            self._worker.close()

    def _on_signal(self, signum: int, _frame: object) -> None:
        # Ctrl-C comes twice where the launcher passes it on.
        if self._closed_at is not None and time.monotonic() - self._closed_at > 1:
            os._exit(128 + signum)
        if self._closed_at is None:
            self._closed_at = time.monotonic()
        self._worker.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: no such address ({error.strerror})") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen at {host}, port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener
