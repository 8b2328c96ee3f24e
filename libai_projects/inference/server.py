"""A small web server: a page for people and a JSON API, in front of one worker.

    GET  /               the page
    GET  /api/health     state, limits and defaults
    POST /api/generate   {"prompt": ...} -> texts; with "stream": true as NDJSON, as they come

Only rank 0 of a job with several processes serves: the web part in a thread, the model in the main
thread.
"""

from __future__ import annotations

import asyncio
import functools
import html
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libai_projects.inference.connections import AllowedHosts, BoundedProtocol
from libai_projects.inference.jobs import ClosedError, Job, NoTextsError, QueueFullError, Worker
from libai_projects.inference.requests import (
    SAMPLING_DEFAULTS,
    Limits,
    request_model,
    sampling_options,
)
from libai_projects.inference.text_pipeline import GeneratedText

logger = logging.getLogger("oneflow_accel")

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page runs its own script and style only, talks to this server only, and cannot be framed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# How often a request without streaming looks whether its client is still there, in seconds.
DISCONNECT_POLL = 0.25

# The answer to a request that was accepted and has no texts, by NoTextsError.kind.
_STATUS = {"refused": 422, "failed": 500, "late": 503, "closed": 503, "cancelled": 503}


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Every error has this form."""
    # A later try may succeed only where the server was busy or stopping.
    more = {"Retry-After": "5"} if status in (429, 503) else {}
    return JSONResponse({"error": message}, status_code=status, headers={**(headers or {}), **more})


def create_app(worker: Worker, limits: Limits, hosts: AllowedHosts) -> FastAPI:
    """The application. Its worker has to run in another thread of this process."""
    # FastAPI's own documentation pages load scripts from elsewhere.
    app = FastAPI(title=worker.engine.words.title, docs_url=None, redoc_url=None)
    model = request_model(limits)
    started = time.monotonic()

    app.add_middleware(_Guard, hosts=hosts)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    words = {name: html.escape(word) for name, word in asdict(worker.engine.words).items()}
    for path, (file, media_type) in PAGE_FILES.items():
        content = (PAGE / file).read_text(encoding="utf-8")
        if path == "/":
            content = Template(content).substitute(words, Text=words["text"].capitalize())
        _add_file(app, path, content, media_type)

    @app.get("/api/health")
    async def health() -> JSONResponse:
        return JSONResponse(
            {
                "status": "stopping" if worker.closing else "ok",
                "model": worker.engine.name,
                "processes": distributed.world_size(),
                "busy": worker.busy,
                "waiting": worker.waiting,
                "uptime_seconds": round(time.monotonic() - started, 1),
                "limits": limits.model_dump(),
                "defaults": SAMPLING_DEFAULTS,
            },
            status_code=503 if worker.closing else 200,
        )

    @app.post("/api/generate", openapi_extra=_body_schema(model))
    async def generate(request: Request) -> Response:
        arrived = time.monotonic()
        try:
            patience = min(limits.seconds, limits.arrival_seconds)
            body = await asyncio.wait_for(_read_body(request, limits.request_bytes), patience)
            asked = _parse(model, body)
            options = sampling_options(asked)
            _check_prompt(worker, asked.prompt, limits)
            worker.engine.check_options(options)
            answer = _Answer(asked, options, arrived, limits)
            worker.submit(answer.job)
        except asyncio.TimeoutError:
            return error_response(408, "the request took too long to arrive")
        except UserError as error:
            return error_response(422, str(error))
        except QueueFullError:
            return error_response(
                429, f"{limits.queue} requests wait already: try again in a few seconds"
            )
        except ClosedError:
            return error_response(503, "the server is shutting down")
        if asked.stream:
            return _Stream(answer)
        return await answer.whole(request)

    return app


async def _http_error(request: Request, error: HTTPException) -> Response:
    """A path that does not exist or has no such method, or what a request was refused for."""
    method, path = request.method, request.url.path
    message = {404: f"there is no {path}", 405: f"{path} takes no {method}"}.get(error.status_code)
    return error_response(error.status_code, message or str(error.detail), error.headers)


async def _unexpected_error(_request: Request, _error: Exception) -> Response:
    return error_response(500, "the server failed; its log says why")


class _Guard:
    """Refuses requests to another server's name, or from another's page (see `connections`;
    Starlette's TrustedHostMiddleware knows the first only), and adds HEADERS to every response.
    Plain ASGI, as Starlette's base class hides lost clients."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self.app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(scope) or self.app)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if not self._hosts.has_host(host):
            return error_response(
                400,
                f"the Host {host!r:.80} is not a name of this server; --allowed-hosts adds one",
            )
        if scope["method"] not in ("GET", "HEAD"):
            for origin in headers.getlist("origin"):
                if not self._hosts.has_origin(origin):
                    return error_response(
                        403,
                        f"a page of {origin!r:.80} must not ask this server; --allowed-hosts adds "
                        "a name",
                    )
        return None


def _add_file(app: FastAPI, path: str, content: str, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page_file() -> Response:
        return Response(content, media_type=media_type)


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _read_body(request: Request, most: int) -> bytes:
    """The body, read no further than `most` bytes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This check also keeps other sites' forms from using a server on this machine.
        raise HTTPException(415, "send JSON: Content-Type: application/json")
    too_large = HTTPException(413, f"the request is larger than {most} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    return body


def _parse(model: type[BaseModel], body: bytes) -> Any:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise HTTPException(422, f"{where}: {message}" if where else message) from None


def _check_prompt(worker: Worker, prompt: str, limits: Limits) -> None:
    tokens = worker.engine.count_tokens(prompt)
    # One position is left for what the model adds.
    most = min(limits.prompt_tokens, worker.engine.max_positions - 1)
    if tokens > most:
        raise HTTPException(422, f"prompt: {tokens} tokens, {most} are allowed; make it shorter")


class _Answer:
    """What comes of a request: its job, which the worker runs in another thread, and what the job
    has said so far, for the server's loop."""

    def __init__(
        self, asked: Any, options: Mapping[str, Any], arrived: float, limits: Limits
    ) -> None:
        self._options, self._arrived = options, arrived
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.job = Job(
            prompts=[asked.prompt],
            options=options,
            on_text=self._on_text if asked.stream else None,
            deadline=arrived + limits.seconds,
        )
        self.job.texts.add_done_callback(self._on_end)

    def _on_text(self, index: int, text: str) -> None:
        self._emit({"type": "text", "index": index, "text": text})

    def _on_end(self, texts: Future[list[GeneratedText]]) -> None:
        try:
            self._emit({"type": "done", "results": [each.as_dict() for each in texts.result()]})
        except NoTextsError as error:
            self._emit({"type": "error", "error": str(error), "kind": error.kind})

    def _emit(self, event: dict[str, Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("the server's loop is closed; nobody waits for this text")

    def _seconds(self) -> float:
        return round(time.monotonic() - self._arrived, 3)

    async def stream(self) -> AsyncIterator[str]:
        """One JSON object per line; the last is of type "done" or "error"."""
        count, seed = self._options["num_return_sequences"], self._options["seed"]
        event: dict[str, Any] = {"type": "start", "count": count, "seed": seed}
        while True:
            if event["type"] == "done":
                event["seconds"] = self._seconds()
            yield json.dumps(event, ensure_ascii=False) + "\n"
            if event["type"] in ("done", "error"):
                return
            event = await self._events.get()

    async def whole(self, request: Request) -> Response:
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), DISCONNECT_POLL)
                break
            except asyncio.TimeoutError:
                if await request.is_disconnected():
                    self.job.cancelled.set()
        if event["type"] == "error":
            return error_response(_STATUS[event["kind"]], event["error"])
        seed = self._options["seed"]
        return JSONResponse({"results": event["results"], "seed": seed, "seconds": self._seconds()})


class _Stream(StreamingResponse):
    """An answer as it comes. When its client goes away, be it before the first line, the job stops
    at its next token."""

    media_type = "application/x-ndjson"

    def __init__(self, answer: _Answer) -> None:
        no_buffers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(answer.stream(), headers=no_buffers)
        self._job = answer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancelled.set()


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
        config = uvicorn.Config(
            create_app(worker, limits, hosts),
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
        title = self._worker.engine.words.title
        print(f"{title} is at {self.address} (Ctrl-C ends it)", flush=True)
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
