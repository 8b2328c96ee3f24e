"""How the server answers requests for texts, on its own API and on OpenAI's: what it refuses and in
which form it says so, a job's texts, whole or as they come, and what it counts of them."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

from oneflow_accel.errors import UserError

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from flow_train.config.schema import Group
from libai_projects.inference.jobs import ClosedError, Job, NoTextsError, Worker
from libai_projects.inference.requests import (
    SAMPLING_DEFAULTS,
    SEED_BOUND,
    Limits,
    new_seed,
    sampling_options,
)
from libai_projects.inference.texts import GeneratedText, Piece, Prompt, ScoredToken, is_prompt

logger = logging.getLogger("oneflow_accel")

# Answers to requests that have no texts, by NoTextsError.kind.
_STATUS = {"full": 429, "refused": 422, "failed": 500}
# What OpenAI's clients find below this path has errors in OpenAI's form.
OPENAI_PATH = "/v1/"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class FieldError(HTTPException):
    """A request that cannot be used, because of one field of its body; "" for all of it."""

    def __init__(self, field: str, message: str, *, status: int = 422) -> None:
        super().__init__(status, f"{field}: {message}" if field else message)
        self.field = field or None


def status_of(error: UserError) -> int:
    return _STATUS.get(error.kind, 503) if isinstance(error, NoTextsError) else 422


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
    if status == 401:
        more = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(body, status_code=status, headers={**(headers or {}), **more})


# Bounds in seconds, from a small model's on a card to a large one's on few cores.
_FIRST = (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_EACH = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """What Prometheus asks a server for: how much is wanted, and how fast it goes."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        where: dict[str, Any] = {"registry": self.registry}
        waiting = Gauge("requests_waiting", "requests in the queue", **where)
        waiting.set_function(lambda: worker.waiting)
        running = Gauge("texts_running", "texts that are being written", **where)
        running.set_function(lambda: worker.batcher.texts)
        self._requests = Counter("requests", "for texts, by how they ended", ["outcome"], **where)
        self._read = Counter("prompt_tokens", "of texts that have ended", **where)
        written = "of texts that have ended; its rate() is tokens/s"
        self._written = Counter("new_tokens", written, **where)
        self._first = Histogram(
            "time_to_first_token_seconds", "from a request's arrival", buckets=_FIRST, **where
        )
        self._each = Histogram(
            "time_per_token_seconds", "after the first, a request's mean", buckets=_EACH, **where
        )

    def count(self, job: Job, arrived: float) -> None:
        """Count a job that has ended."""
        if (error := job.texts.exception()) is not None:
            self.end(getattr(error, "kind", "failed"))
            return
        texts = job.texts.result()
        reasons = {text.finish_reason for text in texts} & {"cancelled", "time"}
        self.end(min(reasons, default="done"))
        self._read.inc(sum({text.prompt: text.prompt_tokens for text in texts}.values()))
        self._written.inc(sum(text.new_tokens for text in texts))
        longest = max(text.new_tokens for text in texts)
        if job.first_token is not None and job.last_token is not None:
            self._first.observe(job.first_token - arrived)
            if longest > 1:
                self._each.observe((job.last_token - job.first_token) / (longest - 1))

    def end(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()


class Answer:
    """What comes of a request: its job, which the worker runs in another thread, and what the job
    has said so far, for the server's loop. A subclass is one API's form of it."""

    media_type: str

    def __init__(
        self,
        worker: Worker,
        limits: Limits,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        *,
        streams: bool,
        keeps_stop: bool = True,
    ) -> None:
        # One position is left for what the model adds.
        most = min(limits.prompt_tokens, worker.engine.max_positions - 1)
        for prompt in prompts:
            if (tokens := len(worker.engine.encode(prompt))) > most:
                message = f"{tokens} tokens, {most} are allowed; make it shorter"
                raise FieldError("prompt", message)
        worker.engine.check_options(options)
        self.streams = streams
        # Set by `respond`.
        self.arrived = 0.0
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        on_text = self._emit if streams else None
        self.job = Job(prompts, options, on_text, keeps_stop=keeps_stop)
        self.job.texts.add_done_callback(self._end)

    def first_lines(self) -> Iterable[str]:
        """What a stream begins with."""
        return ()

    def lines(self, event: Piece | list[GeneratedText] | NoTextsError) -> Iterable[str]:
        """What a stream says of a piece and, at last, of all texts, or why there are none."""
        raise NotImplementedError

    def body(self, texts: list[GeneratedText]) -> dict[str, Any]:
        """The whole answer; a NoTextsError where these are none."""
        raise NotImplementedError

    def _end(self, texts: Future[list[GeneratedText]]) -> None:
        self._emit(texts.exception() or texts.result())

    def _emit(self, event: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("the server's loop is closed; nobody waits for this text")

    async def stream(self) -> AsyncIterator[str]:
        for line in self.first_lines():
            yield line
        event: Any = None
        while not isinstance(event, list | NoTextsError):
            event = await self._events.get()
            for line in self.lines(event):
                yield line
            # The loop has to see that a client has gone, however many events there are.
            await asyncio.sleep(0)

    async def whole(self, request: Request) -> Response:
        event = asyncio.ensure_future(self._events.get())
        # The body is read: what comes next is that the client has gone.
        gone = asyncio.ensure_future(request.receive())
        await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
        if not event.done():
            self.job.cancelled.set()
        gone.cancel()
        texts = await event
        try:
            if isinstance(texts, NoTextsError):
                raise texts
            return JSONResponse(self.body(texts))
        except NoTextsError as error:
            return error_response(request.url.path, status_of(error), str(error))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class PageAnswer(Answer):
    """What the page asks for: JSON, or one object per line, the last of type "done" or "error"."""

    media_type = "application/x-ndjson"

    def __init__(self, worker: Worker, limits: Limits, asked: Any) -> None:
        options = sampling_options(asked)
        super().__init__(worker, limits, [asked.prompt], options, streams=asked.stream)

    def first_lines(self) -> Iterable[str]:
        options = self.job.options
        start = {"count": options["num_return_sequences"], "seed": options["seed"]}
        yield _json({"type": "start", **start}) + "\n"

    def lines(self, event: Piece | list[GeneratedText] | NoTextsError) -> Iterable[str]:
        if isinstance(event, Piece):
            said: dict[str, Any] = {"type": "text", "index": event.index, "text": event.text}
        elif isinstance(event, NoTextsError):
            said = {"type": "error", "error": str(event), "kind": event.kind}
        else:
            said = {"type": "done", **self.body(event)}
        # The last piece of a text may be empty.
        if said.get("text") != "":
            yield _json(said) + "\n"

    def body(self, texts: list[GeneratedText]) -> dict[str, Any]:
        seconds = round(time.monotonic() - self.arrived, 3)
        results = [text.as_dict() for text in texts]
        return {"results": results, "seed": self.job.options["seed"], "seconds": seconds}


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
    model: type[BaseModel],
    form: Callable[[Worker, Limits, Any], Answer],
) -> Response:
    """Read a request's body, a `model`, and answer in the `form` of its API."""
    arrived = time.monotonic()
    try:
        patience = min(limits.seconds, limits.arrival_seconds)
        body = await asyncio.wait_for(_read_body(request, limits.request_bytes), patience)
        answer = form(worker, limits, _parse(model, body))
        answer.arrived, answer.job.deadline = arrived, arrived + limits.seconds
        worker.submit(answer.job)
    except asyncio.TimeoutError:
        status, message = 408, "the request took too long to arrive"
    except UserError as error:
        status, message = status_of(error), str(error)
    else:
        answer.job.texts.add_done_callback(lambda _: metrics.count(answer.job, arrived))
        return _Stream(answer) if answer.streams else await answer.whole(request)
    metrics.end({429: "full", 503: "closed"}.get(status, "refused"))
    return error_response(request.url.path, status, message)


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
        raise FieldError(where, first["msg"].removeprefix("Value error, ")) from None


# OpenAI's API, as far as its clients use it to continue texts. Sampling is that of
# GenerationOptions, with OpenAI's names and defaults; other fields are refused by name.
_COMPLETIONS = f"{OPENAI_PATH}completions"
# Those of OpenAI, which knows no other; a text that the deadline cuts is cut as by a length.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}
_CHAT = (
    "this model continues texts and has no chat template, so it cannot tell messages apart: put "
    "them into one prompt for /v1/completions"
)


def _prompts(value: Any) -> list[Prompt]:
    """One or several: texts, or lists of token ids."""
    prompts = [value] if is_prompt(value) else value
    if not isinstance(prompts, list) or not prompts or not all(map(is_prompt, prompts)):
        raise ValueError("must be a text, a list of token ids, or a list of such")
    return prompts


_Count = Annotated[int, Field(ge=1)]
_Text = Annotated[str, Field(min_length=1)]
_Several = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
_Nothing = Annotated[float, Field(ge=0, le=0)]


class _StreamOptions(Group):
    include_usage: bool = False


class _Request(Group):
    model: str
    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: _Count | None = None
    stop: Annotated[list[_Text] | None, Field(max_length=4), _Several] = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    # Clients send these even where they want nothing of them.
    frequency_penalty: _Nothing | None = None
    presence_penalty: _Nothing | None = None
    # What others have beside OpenAI's.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None


def _options(asked: _Request, limits: Limits) -> dict[str, Any]:
    """Those of GenerationOptions that a request is; FieldError for more than is allowed."""
    n, new = asked.n or 1, asked.max_tokens or min(16, limits.new_tokens)
    if new > limits.new_tokens:
        raise FieldError("max_tokens", f"is {new}, and at most {limits.new_tokens} are allowed")
    if (count := n * len(asked.prompt)) > limits.returns:
        raise FieldError("n", f"makes {count} texts, and at most {limits.returns} are allowed")
    warm = 1.0 if asked.temperature is None else asked.temperature
    same_name = {"top_p", "top_k", "min_p", "repetition_penalty"}
    return {
        **SAMPLING_DEFAULTS,
        "top_p": 1.0,
        "top_k": 0,
        **asked.model_dump(include=same_name, exclude_none=True),
        # Greedy decoding has one text: several are drawn from the likeliest token alone.
        **({"top_k": 1} if warm == 0 and n > 1 else {}),
        "do_sample": warm > 0 or n > 1,
        "temperature": warm or 1.0,
        "num_beams": 1,
        "num_return_sequences": n,
        "max_new_tokens": new,
        "seed": new_seed() if asked.seed is None else asked.seed % SEED_BOUND,
        "stop_strings": asked.stop or (),
        "logprobs": asked.logprobs,
    }


class _Completion(Answer):
    """A completion of OpenAI's: JSON, or server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, worker: Worker, limits: Limits, asked: _Request) -> None:
        engine, options = worker.engine, _options(asked, limits)
        _check_name(asked.model, engine.name)
        super().__init__(
            worker, limits, asked.prompt, options, streams=bool(asked.stream), keeps_stop=False
        )
        self._scores, self._each = asked.logprobs is not None, options["num_return_sequences"]
        self._says_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._base = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
        }

    def lines(self, event: Piece | list[GeneratedText] | NoTextsError) -> Iterable[str]:
        if isinstance(event, Piece):
            if event.finish_reason != "cancelled":
                choice = self._choice(event.index, event.text, event.scores, event.finish_reason)
                yield self._chunk([choice])
            return
        try:
            if isinstance(event, NoTextsError):
                raise event
            usage = self.body(event)["usage"]
        except NoTextsError as error:
            yield f"data: {_json(error_body(_COMPLETIONS, status_of(error), str(error)))}\n\n"
            return
        if self._says_usage:
            yield self._chunk([], usage)
        yield "data: [DONE]\n\n"

    def body(self, texts: list[GeneratedText]) -> dict[str, Any]:
        if any(text.finish_reason == "cancelled" for text in texts):
            raise ClosedError
        read = sum(text.prompt_tokens for text in texts[:: self._each])
        written = sum(text.new_tokens for text in texts)
        usage = {"prompt_tokens": read, "completion_tokens": written}
        choices = [
            self._choice(i, x.added, x.scores or (), x.finish_reason) for i, x in enumerate(texts)
        ]
        return {
            **self._base,
            "choices": choices,
            "usage": {**usage, "total_tokens": read + written},
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        more = {"usage": usage} if self._says_usage else {}
        return f"data: {_json({**self._base, 'choices': choices, **more})}\n\n"

    def _choice(
        self, index: int, text: str, scores: Sequence[ScoredToken], reason: str | None
    ) -> dict[str, Any]:
        logprobs = {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            # The token itself, too, where it is none of the likeliest.
            "top_logprobs": [{**score.top, score.text: score.logprob} for score in scores],
            "text_offset": [score.offset for score in scores],
        }
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs if self._scores else None,
            "finish_reason": None if reason is None else _REASONS[reason],
        }


def _check_name(asked: str, name: str) -> None:
    if asked != name:
        raise FieldError("model", f"there is no {asked!r:.80}; this is {name!r}", status=404)


def add_openai_routes(app: FastAPI, worker: Worker, limits: Limits, metrics: Metrics) -> None:
    name = worker.engine.name
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "local"}

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        _check_name(model, name)
        return JSONResponse(card)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return error_response(request.url.path, 404, _CHAT)

    @app.post(_COMPLETIONS)
    async def completions(request: Request) -> Response:
        return await respond(request, worker, limits, metrics, _Request, _Completion)
