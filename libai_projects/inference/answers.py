"""How the server answers requests for texts, on its own API and on OpenAI's: what it refuses and in
which form it says so, and a job's texts, whole or as they come."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from oneflow_accel.errors import UserError

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from libai_projects.inference.jobs import ClosedError, Job, NoTextsError, QueueFullError, Worker
from libai_projects.inference.metrics import Metrics
from libai_projects.inference.requests import Limits
from libai_projects.inference.text_pipeline import Prompt
from libai_projects.inference.texts import GeneratedText, Piece

logger = logging.getLogger("oneflow_accel")

# How often a request without streaming looks whether its client is still there, in seconds.
DISCONNECT_POLL = 0.25
# The answer to a request that was accepted and has no texts, by NoTextsError.kind.
_STATUS = {"refused": 422, "failed": 500, "late": 503, "closed": 503, "cancelled": 503}
# What OpenAI's clients find below this path has errors in OpenAI's form.
OPENAI_PATH = "/v1/"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class FieldError(HTTPException):
    """A request that cannot be used, because of one field of its body; "" for all of it."""

    def __init__(self, field: str, message: str, *, status: int = 422) -> None:
        super().__init__(status, f"{field}: {message}" if field else message)
        self.field = field or None


def error_body(path: str, status: int, message: str, field: str | None = None) -> dict[str, Any]:
    if not path.startswith(OPENAI_PATH):
        return {"error": message}
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = {401: "invalid_api_key", 404: "model_not_found" if field else None}.get(status)
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def error_response(
    path: str,
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    field: str | None = None,
) -> JSONResponse:
    """Every error has the form of its API."""
    body = error_body(path, status, message, field)
    if path.startswith(OPENAI_PATH) and status == 422:
        status = 400
    # A later try may succeed only where the server was busy or stopping.
    more = {"Retry-After": "5"} if status in (429, 503) else {}
    return JSONResponse(body, status_code=status, headers={**(headers or {}), **more})


# What a job says at last: its texts, or why there are none; before, its pieces.
Event = Literal["start"] | Piece | list[GeneratedText] | NoTextsError


class Answer:
    """What comes of a request: its job, which the worker runs in another thread, and what the job
    has said so far, for the server's loop. A subclass is one API's form of it."""

    media_type: str

    def __init__(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        deadline: float,
        *,
        streams: bool,
        keeps_stop: bool = True,
    ) -> None:
        self.streams = streams
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        on_text = self._emit if streams else None
        self.job = Job(prompts, options, on_text, deadline, keeps_stop)
        self.job.texts.add_done_callback(lambda end: self._emit(end.exception() or end.result()))

    def lines(self, event: Event) -> Iterable[str]:
        """What a stream says of an event; of "start" at its beginning."""
        raise NotImplementedError

    def body(self, texts: list[GeneratedText]) -> dict[str, Any]:
        """The whole answer; a NoTextsError where these are none."""
        raise NotImplementedError

    def _emit(self, event: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("the server's loop is closed; nobody waits for this text")

    async def stream(self) -> AsyncIterator[str]:
        event: Event = "start"
        while True:
            for line in self.lines(event):
                yield line
            if isinstance(event, list | NoTextsError):
                return
            event = await self._events.get()
            # The loop has to see that a client has gone, however many events there are.
            await asyncio.sleep(0)

    async def whole(self, request: Request) -> Response:
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), DISCONNECT_POLL)
                break
            except asyncio.TimeoutError:
                if await request.is_disconnected():
                    self.job.cancelled.set()
        try:
            if isinstance(event, NoTextsError):
                raise event
            return JSONResponse(self.body(event))
        except NoTextsError as error:
            return error_response(request.url.path, _STATUS[error.kind], str(error))


class _Stream(StreamingResponse):
    """An answer as it comes. When its client goes away, be it before the first line, the job stops
    at its next token."""

    def __init__(self, answer: Answer) -> None:
        self.media_type = answer.media_type
        no_buffers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(answer.stream(), headers=no_buffers)
        self._job = answer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancelled.set()


async def respond(
    request: Request,
    worker: Worker,
    limits: Limits,
    metrics: Metrics,
    make: Callable[[bytes, float], Answer],
) -> Response:
    """Read a request's body, let `make` say what is asked for, by body and deadline, and answer."""
    path, arrived = request.url.path, time.monotonic()
    try:
        patience = min(limits.seconds, limits.arrival_seconds)
        body = await asyncio.wait_for(_read_body(request, limits.request_bytes), patience)
        answer = make(body, arrived + limits.seconds)
        worker.submit(answer.job)
    except asyncio.TimeoutError:
        status, message = 408, "the request took too long to arrive"
    except UserError as error:
        status, message = 422, str(error)
    except QueueFullError:
        status = 429
        message = f"{limits.queue} requests wait already: try again in a few seconds"
    except ClosedError:
        status, message = 503, "the server is shutting down"
    else:
        metrics.watch(answer.job, arrived)
        return _Stream(answer) if answer.streams else await answer.whole(request)
    metrics.refuse(status)
    return error_response(path, status, message)


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


def parse(model: type[BaseModel], body: bytes) -> Any:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FieldError(where, first["msg"].removeprefix("Value error, ")) from None


def check_prompt(worker: Worker, prompt: Prompt, limits: Limits) -> None:
    tokens = len(worker.engine.encode(prompt))
    # One position is left for what the model adds.
    most = min(limits.prompt_tokens, worker.engine.max_positions - 1)
    if tokens > most:
        raise FieldError("prompt", f"{tokens} tokens, {most} are allowed; make it shorter")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
