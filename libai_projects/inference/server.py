"""A small web server: a page for people and APIs for programs, in front of one worker.

    GET  /                 the page
    GET  /health           state, limits and defaults; the page's own is /api/health
    GET  /metrics          numbers for Prometheus
    POST /api/generate     {"prompt": ...} -> texts; with "stream": true as NDJSON, as they come
    POST /v1/completions   as OpenAI's clients ask; and GET /v1/models

Only rank 0 of a job with several processes serves: the web part in a thread, the model in the main
thread.
"""

from __future__ import annotations

import functools
import hmac
import html
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from oneflow_accel import distributed, watchdog
from oneflow_accel.errors import UserError

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libai_projects.inference.answers import (
    OPENAI_PATH,
    FieldError,
    Metrics,
    PageAnswer,
    add_openai_routes,
    error_response,
    respond,
)
from libai_projects.inference.connections import AllowedHosts, BoundedProtocol
from libai_projects.inference.jobs import NoTextsError, Worker
from libai_projects.inference.requests import SAMPLING_DEFAULTS, Limits, request_model

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# What needs the key, where there is one.
_NEED_KEY = (OPENAI_PATH, "/api/generate", "/metrics")
# The page runs its own script and style only, talks to this server only, and cannot be framed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def create_app(
    worker: Worker,
    limits: Limits,
    hosts: AllowedHosts,
    origins: Sequence[str] = (),
    key: str | None = None,
) -> FastAPI:
    """The application. Its worker has to run in another thread of this process. Pages of `origins`
    may ask it, too; with a `key` all must show it who want texts or numbers."""
    # FastAPI's own documentation pages load scripts from elsewhere.
    app = FastAPI(title=worker.engine.words.title, docs_url=None, redoc_url=None)
    model = request_model(limits)
    started = time.monotonic()

    metrics = Metrics(worker)
    app.add_middleware(_Guard, hosts=hosts, origins=origins, key=key)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    words = {name: html.escape(word) for name, word in asdict(worker.engine.words).items()}
    for path, (file, media_type) in PAGE_FILES.items():
        content = (PAGE / file).read_text(encoding="utf-8")
        if path == "/":
            content = Template(content).substitute(words, Text=words["text"].capitalize())
        _add_file(app, path, content, media_type)

    @app.get("/health")
    @app.get("/api/health")
    async def health() -> JSONResponse:
        return JSONResponse(
            {
                "status": "stopping" if worker.closing else "ok",
                "model": worker.engine.name,
                "processes": distributed.world_size(),
                "busy": worker.busy,
                "waiting": worker.waiting,
                "writing": worker.batcher.texts,
                "needs_key": key is not None,
                "uptime_seconds": round(time.monotonic() - started, 1),
                "limits": limits.model_dump(),
                "defaults": SAMPLING_DEFAULTS,
            },
            status_code=503 if worker.closing else 200,
        )

    @app.get("/metrics")
    async def numbers() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/api/generate", openapi_extra=_body_schema(model))
    async def generate(request: Request) -> Response:
        return await respond(request, worker, limits, metrics, model, PageAnswer)

    add_openai_routes(app, worker, limits, metrics)
    return app


async def _http_error(request: Request, error: HTTPException) -> Response:
    """A path that does not exist or has no such method, or what a request was refused for."""
    method, path = request.method, request.url.path
    message = {404: f"there is no {path}", 405: f"{path} takes no {method}"}.get(error.status_code)
    field = error.field if isinstance(error, FieldError) else None
    if field is not None or message is None:
        message = str(error.detail)
    return error_response(path, error.status_code, message, error.headers, field)


async def _unexpected_error(request: Request, _error: Exception) -> Response:
    return error_response(request.url.path, 500, "the server failed; its log says why")


class _Guard:
    """Refuses requests to another server's name, from another's page (see `connections`;
    Starlette's TrustedHostMiddleware knows the first only) or without the key, and adds HEADERS to
    every response. Plain ASGI, as Starlette's base class hides lost clients."""

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, origins: Sequence[str], key: str | None
    ) -> None:
        self.app = app
        self._hosts, self._origins, self._key = hosts, origins, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            refusal = self._refusal(scope)
            app = self.app if refusal is None else error_response(scope["path"], *refusal)
            await app(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if not self._hosts.has_host(host):
            name = f"{host!r:.80} is not a name of this server"
            return 400, f"the Host {name}; --allowed-hosts adds one"
        for origin in headers.getlist("origin") if scope["method"] not in ("GET", "HEAD") else ():
            if not {origin, "*"} & set(self._origins) and not self._hosts.has_origin(origin):
                return 403, (
                    f"a page of {origin!r:.80} must not ask this server; --allowed-hosts adds a "
                    "name, --allowed-origins a page of another server"
                )
        if self._key is not None and scope["path"].startswith(_NEED_KEY):
            kind, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(), self._key.encode())
            if kind.lower() != "bearer" or not same:
                return 401, "this server needs its key: Authorization: Bearer KEY"
        return None


def _add_file(app: FastAPI, path: str, content: str, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page_file() -> Response:
        return Response(content, media_type=media_type)


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


# Texts that are being written at SIGTERM may go on for so long, in seconds.
GRACE_SECONDS = 10.0
# How long answers take from the worker's thread to the clients, in seconds.
LAST_WORDS_SECONDS = 0.3
# Connections that are still busy after a signal get this long, in seconds.
SHUTDOWN_SECONDS = 5
# Seconds that a client has for taking the answer, beyond the time for making it.
_TAKE_SECONDS = 15
# Further connections beside those of waiting requests: people at the page, health checks.
_MORE_CONNECTIONS = 256


class Server:
    """A server that listens from its construction on, and answers while `run` runs.

    Port 0 takes a free one; `allowed_hosts` are further names, see `connections.AllowedHosts`;
    for `allowed_origins` and `key` see `create_app`. UserError where the address cannot be used.
    """

    def __init__(
        self,
        worker: Worker,
        limits: Limits,
        host: str,
        port: int,
        allowed_hosts: Sequence[str] = (),
        allowed_origins: Sequence[str] = (),
        key: str | None = None,
    ) -> None:
        self._worker = worker
        self._closed_at: float | None = None
        hosts = AllowedHosts(host, allowed_hosts)
        self._socket = _listen(host, port)
        config = uvicorn.Config(
            create_app(worker, limits, hosts, allowed_origins, key),
            http=functools.partial(
                BoundedProtocol,
                head_seconds=limits.arrival_seconds,
                answer_seconds=limits.seconds + limits.arrival_seconds + _TAKE_SECONDS,
                most=limits.queue + _MORE_CONNECTIONS,
            ),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            # BoundedProtocol ends idle connections. httpx, OpenAI's client too, reuses one for 5 s,
            # and must not find it closed at that moment, as uvicorn's own 5 s would have it.
            timeout_keep_alive=60,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; must be called in the main thread. Requests that wait then
        get 503; running texts stop at their next token, with SIGTERM after GRACE_SECONDS. A second
        signal, a second later, ends at once."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        title = self._worker.engine.words.title
        print(f"{title} is at {self.address} (Ctrl-C ends it)", flush=True)
        self.serve()

    def serve(self) -> None:
        thread = threading.Thread(target=self._run_web, name="web")
        thread.start()
        try:
            with watchdog.last_words(self._say_that_it_ends):
                self._worker.run()
        finally:
            self._worker.close()
            self._server.should_exit = True
            thread.join(SHUTDOWN_SECONDS + 5)
            self._socket.close()

    def _say_that_it_ends(self, _why: str) -> None:
        """Tell each client, before the watchdog ends this process, that another one has ended."""
        sentence = "a process of this server ended, and the server with it: try again later"
        self._worker.abandon(NoTextsError("failed", sentence))
        time.sleep(LAST_WORDS_SECONDS)

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
            self._worker.close(grace=GRACE_SECONDS if signum == signal.SIGTERM else 0.0)


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
