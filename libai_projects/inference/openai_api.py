"""The part of OpenAI's API that clients use to continue texts: /v1/completions and /v1/models.

Sampling is that of GenerationOptions, with OpenAI's names and defaults; what a request asks for and
there is not is refused by name.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BeforeValidator, Field

from flow_train.config.schema import Group
from libai_projects.inference.answers import (
    Answer,
    Event,
    FieldError,
    as_json,
    check_prompt,
    error_body,
    error_response,
    parse,
    respond,
)
from libai_projects.inference.jobs import NoTextsError, Worker
from libai_projects.inference.metrics import Metrics
from libai_projects.inference.requests import SAMPLING_DEFAULTS, SEED_BOUND, Limits
from libai_projects.inference.text_pipeline import Prompt
from libai_projects.inference.texts import GeneratedText, Piece, ScoredToken

_PATH = "/v1/completions"
# Those of OpenAI, which knows no other; a text that the deadline cuts is cut as by a length.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}
_CHAT = (
    "this model continues texts and has no chat template, so it cannot tell messages apart: put "
    "them into one prompt for /v1/completions"
)

_Count = Annotated[int, Field(ge=1)]


def _prompts(value: Any) -> list[Prompt]:
    """One or several: texts, or lists of token ids."""

    def is_prompt(value: Any) -> bool:
        is_ids = isinstance(value, list) and {type(each) for each in value} == {int}
        return is_ids or isinstance(value, str)

    if is_prompt(value):
        return [value]
    if isinstance(value, list) and value and all(map(is_prompt, value)):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of such")


_STOP = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class _StreamOptions(Group):
    include_usage: bool = False


class _Request(Group):
    model: str
    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: _Count | None = None
    best_of: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=4), _STOP
    ] = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    # What others have beside OpenAI's.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    # Of these only what changes nothing.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None


def _options(asked: _Request, limits: Limits) -> dict[str, Any]:
    """Those of GenerationOptions that a request is; FieldError for what is not done here."""
    n, new = asked.n or 1, asked.max_tokens or min(16, limits.new_tokens)
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "suffix"):
        if getattr(asked, name):
            raise FieldError(name, "is not known here: leave it out (repetition_penalty is)")
    if asked.best_of not in (None, n):
        raise FieldError("best_of", f"must be n, which is {n}: texts are not ranked here")
    if asked.echo and asked.logprobs is not None:
        raise FieldError("echo", "with logprobs is not known here: leave one of the two out")
    if asked.stream_options is not None and not asked.stream:
        raise FieldError("stream_options", "is for stream: true")
    if new > limits.new_tokens:
        raise FieldError("max_tokens", f"is {new}, and at most {limits.new_tokens} are allowed")
    if (count := n * len(asked.prompt)) > limits.returns:
        raise FieldError("n", f"makes {count} texts, and at most {limits.returns} are allowed")
    warm = 1.0 if asked.temperature is None else asked.temperature
    seed = random.SystemRandom().randrange(SEED_BOUND) if asked.seed is None else asked.seed
    options = {
        **SAMPLING_DEFAULTS,
        "num_beams": 1,
        "num_return_sequences": n,
        "max_new_tokens": new,
        "min_new_tokens": asked.min_tokens,
        "do_sample": warm > 0,
        "temperature": warm or 1.0,
        "top_p": asked.top_p or 1.0,
        "top_k": asked.top_k or 0,
        "min_p": asked.min_p or 0.0,
        "repetition_penalty": asked.repetition_penalty or 1.0,
        "seed": seed % SEED_BOUND,
        "stop_strings": asked.stop or (),
        "logprobs": asked.logprobs,
    }
    if warm == 0 and n > 1:
        # Drawn from the likeliest alone, as greedy decoding has one text.
        options |= {"do_sample": True, "top_k": 1}
    return options


class _Completion(Answer):
    """A completion of OpenAI's: JSON, or server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, asked: _Request, worker: Worker, limits: Limits, deadline: float) -> None:
        engine, prompts = worker.engine, asked.prompt
        if asked.model != engine.name:
            message = f"there is no {asked.model!r:.80}; this is {engine.name!r}"
            raise FieldError("model", message, status=404)
        options = _options(asked, limits)
        for prompt in prompts:
            check_prompt(worker, prompt, limits)
        engine.check_options(options)
        super().__init__(prompts, options, deadline, streams=bool(asked.stream), keeps_stop=False)
        self._given = [engine.text_of(prompt) if asked.echo else "" for prompt in prompts]
        self._each = options["num_return_sequences"]
        self._scores = asked.logprobs is not None
        self._says_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._base = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
        }

    def lines(self, event: Event) -> Iterable[str]:
        if isinstance(event, Piece):
            if event.finish_reason != "cancelled":
                choice = self._choice(event.index, event.text, event.scores, event.finish_reason)
                yield self._chunk([choice])
            return
        if event == "start":
            for index, given in enumerate(self._given):
                for each in range(self._each if given else 0):
                    yield self._chunk([self._choice(index * self._each + each, given, (), None)])
            return
        try:
            if isinstance(event, NoTextsError):
                raise event
            usage = self.body(event)["usage"]
        except NoTextsError as error:
            status = 400 if error.kind == "refused" else 500
            yield f"data: {as_json(error_body(_PATH, status, str(error)))}\n\n"
            return
        if self._says_usage:
            yield self._chunk([], usage)
        yield "data: [DONE]\n\n"

    def body(self, texts: list[GeneratedText]) -> dict[str, Any]:
        if any(text.finish_reason == "cancelled" for text in texts):
            raise NoTextsError("closed", "the server is shutting down")
        read = sum(text.prompt_tokens for text in texts[:: self._each])
        written = sum(text.new_tokens for text in texts)
        usage = {"prompt_tokens": read, "completion_tokens": written}
        choices = [
            self._choice(i, self._given[x.prompt] + x.added, x.scores or (), x.finish_reason)
            for i, x in enumerate(texts)
        ]
        usage = {**usage, "total_tokens": read + written}
        return {**self._base, "choices": choices, "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        more = {"usage": usage} if self._says_usage else {}
        return f"data: {as_json({**self._base, 'choices': choices, **more})}\n\n"

    def _choice(
        self, index: int, text: str, scores: Sequence[ScoredToken], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": _log_probabilities(scores) if self._scores else None,
            "finish_reason": None if reason is None else _REASONS[reason],
        }


def _log_probabilities(scores: Sequence[ScoredToken]) -> dict[str, list[Any]]:
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        # The token itself, too, where it is none of the likeliest.
        "top_logprobs": [{**score.top, score.text: score.logprob} for score in scores],
        "text_offset": [score.offset for score in scores],
    }


def add_routes(app: FastAPI, worker: Worker, limits: Limits, metrics: Metrics) -> None:
    name, made = worker.engine.name, int(time.time())
    card = {"id": name, "object": "model", "created": made, "owned_by": "local"}

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model != name:
            raise FieldError("model", f"there is no {model!r:.80}; this is {name!r}", status=404)
        return JSONResponse(card)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return error_response(request.url.path, 404, _CHAT)

    @app.post(_PATH)
    async def completions(request: Request) -> Response:
        def make(body: bytes, deadline: float) -> Answer:
            return _Completion(parse(_Request, body), worker, limits, deadline)

        return await respond(request, worker, limits, metrics, make)
