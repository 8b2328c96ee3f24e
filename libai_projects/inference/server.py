"""A small web server: a page for people and a JSON API, in front of one worker.

    GET  /               the page
    GET  /api/health     state, limits and defaults
    POST /api/generate   {"prompt": ...} -> texts; with "stream": true as NDJSON, as they come

Only rank 0 of a job with several processes serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libai_projects.inference.connections import AllowedHosts
from libai_projects.inference.engine import GeneratedText
from libai_projects.inference.jobs import ClosedError, Job, Problem, QueueFullError, Worker
from libai_projects.inference.requests import (
    SAMPLING_DEFAULTS,
    Limits,
    request_model,
    sampling_options,
)

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

# The answer to a request that was accepted and has no texts, by Problem.kind.
_STATUS = {"refused": 422, "failed": 500, "late": 503, "closed": 503, "cancelled": 503}


class RefusedError(Exception):
    """A request that gets an error: the HTTP status and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
    app = FastAPI(title="MagicPrompt", docs_url=None, redoc_url=None)
    model = request_model(limits)
    started = time.monotonic()

    # The one that is added last sees a request first.
    app.add_middleware(_CheckNames, hosts=hosts)
    app.add_middleware(_AddHeaders)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    for path, (file, media_type) in PAGE_FILES.items():
        _add_file(app, path, file, media_type)

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
                "limits": limits.as_dict(),
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
            events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            job = _make_job(
                asked.prompt, options, events, stream=asked.stream, arrived=arrived, limits=limits
            )
            worker.submit(job)
        except asyncio.TimeoutError:
            return error_response(408, "the request took too long to arrive")
        except RefusedError as refused:
            return error_response(refused.status, str(refused))
        except UserError as error:
            return error_response(422, str(error))
        except QueueFullError:
            return error_response(
                429, f"{limits.queue} requests wait already: try again in a few seconds"
            )
        except ClosedError:
            return error_response(503, "the server is shutting down")
        if asked.stream:
            return StreamingResponse(
                _stream(job, events, options, arrived),
                media_type="application/x-ndjson",
                headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            )
        return await _answer(request, job, events, options, arrived)

    return app


async def _http_error(request: Request, error: HTTPException) -> Response:
    """A path that does not exist, or has no such method."""
    method, path = request.method, request.url.path
    message = {404: f"there is no {path}", 405: f"{path} takes no {method}"}.get(error.status_code)
    return error_response(error.status_code, message or str(error.detail), error.headers)


async def _unexpected_error(_request: Request, _error: Exception) -> Response:
    return error_response(500, "the server failed; its log says why")


class _CheckNames:
    """Refuses requests to another server's name, or from another's page; see `connections`.
    Starlette's TrustedHostMiddleware knows the first only."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self.app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if not self._hosts.has_host(host):
            return error_response(
                400,
                f"the Host header {host!r:.80} is no name of this server; --allowed-hosts adds one",
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


class _AddHeaders:
    """Adds HEADERS to every response; plain ASGI, as Starlette's base class hides lost clients."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _add_file(app: FastAPI, path: str, file: str, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page_file() -> FileResponse:
        return FileResponse(PAGE / file, media_type=media_type)


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _read_body(request: Request, most: int) -> bytes:
    """The body, read no further than `most` bytes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This check also keeps other sites' forms from using a server on this machine.
        raise RefusedError(415, "send JSON: Content-Type: application/json")
    too_large = RefusedError(413, f"the request is larger than {most} bytes")
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
        raise RefusedError(422, f"{where}: {message}" if where else message) from None


def _check_prompt(worker: Worker, prompt: str, limits: Limits) -> None:
    tokens = worker.engine.count_tokens(prompt)
    # One position is left for what the model adds.
    most = min(limits.prompt_tokens, worker.engine.max_positions - 1)
    if tokens > most:
        raise RefusedError(422, f"prompt: {tokens} tokens, {most} are allowed; make it shorter")


def _make_job(
    prompt: str,
    options: Mapping[str, Any],
    events: asyncio.Queue[dict[str, Any]],
    *,
    stream: bool,
    arrived: float,
    limits: Limits,
) -> Job:
    loop = asyncio.get_running_loop()

    def emit(event: dict[str, Any]) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:
            logger.debug("the server's loop is closed; nobody waits for this text")

    def on_text(index: int, text: str) -> None:
        emit({"type": "text", "index": index, "text": text})

    def on_end(texts: list[GeneratedText] | None, problem: Problem | None) -> None:
        if problem is not None:
            emit({"type": "error", "error": problem.message, "kind": problem.kind})
            return
        emit({"type": "done", "results": [each.as_dict() for each in texts]})

    return Job(
        prompts=[prompt],
        options=options,
        on_end=on_end,
        on_text=on_text if stream else None,
        deadline=arrived + limits.seconds,
    )


async def _stream(
    job: Job, events: asyncio.Queue[dict[str, Any]], options: Mapping[str, Any], arrived: float
) -> AsyncIterator[str]:
    """One JSON object per line; the last is of type "done" or "error"."""
    try:
        yield _line(
            {"type": "start", "count": options["num_return_sequences"], "seed": options["seed"]}
        )
        while True:
            event = await events.get()
            if event["type"] == "done":
                event["seconds"] = round(time.monotonic() - arrived, 3)
            yield _line(event)
            if event["type"] != "text":
                return
    finally:
        # This also runs when the client goes away, and then stops the job at its next token.
        job.cancelled.set()


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False) + "\n"


async def _answer(
    request: Request,
    job: Job,
    events: asyncio.Queue[dict[str, Any]],
    options: Mapping[str, Any],
    arrived: float,
) -> Response:
    while True:
        try:
            event = await asyncio.wait_for(events.get(), DISCONNECT_POLL)
            break
        except asyncio.TimeoutError:
            if await request.is_disconnected():
                job.cancelled.set()
    if event["type"] == "error":
        return error_response(_STATUS[event["kind"]], event["error"])
    seconds = round(time.monotonic() - arrived, 3)
    return JSONResponse({"results": event["results"], "seed": options["seed"], "seconds": seconds})
