"""The body of POST /api/generate: its fields, their bounds and their defaults; and what a request
may ask for."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from oneflow_accel.errors import UserError

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator


@dataclass(frozen=True)
class Limits:
    """Upper bounds; a request beyond one is refused before it reaches the model.

    Attributes:
        request_bytes: size of a request's body.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens to add to each prompt.
        returns: texts from one prompt.
        seconds: from a request's arrival to its last token, waiting included.
        arrival_seconds: from a connection's opening to the end of a request's head, and from there
            to the end of its body.
        queue: requests that may wait while one runs.
    """

    request_bytes: int = 16_384
    prompt_tokens: int = 256
    new_tokens: int = 256
    returns: int = 8
    seconds: float = 60.0
    arrival_seconds: float = 10.0
    queue: int = 16

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


# The page's own defaults: four different prompts, of a useful length.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "num_return_sequences": 4,
    "max_new_tokens": 60,
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}
SEED_BOUND = 2**31


class _GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("prompt", check_fields=False)
    @classmethod
    def _not_blank(cls, prompt: str) -> str:
        if not prompt.strip():
            raise ValueError("type something first")
        if "\0" in prompt:
            raise ValueError("must not hold NUL characters")
        return prompt


def request_model(limits: Limits) -> type[BaseModel]:
    """The body's model, with the bounds that `limits` sets; unknown fields are refused."""
    defaults = SAMPLING_DEFAULTS | {
        "num_return_sequences": min(SAMPLING_DEFAULTS["num_return_sequences"], limits.returns),
        "max_new_tokens": min(SAMPLING_DEFAULTS["max_new_tokens"], limits.new_tokens),
    }

    def bounded(kind: type, name: str, **bounds: float) -> tuple[type, Any]:
        return kind, Field(defaults[name], **bounds)

    return create_model(
        "GenerateRequest",
        __base__=_GenerateRequest,
        prompt=(str, Field(max_length=limits.request_bytes)),
        stream=(bool, False),
        # Drawn where absent; the answer says which it was.
        seed=(int | None, Field(None, ge=0, lt=SEED_BOUND)),
        num_return_sequences=bounded(int, "num_return_sequences", ge=1, le=limits.returns),
        max_new_tokens=bounded(int, "max_new_tokens", ge=1, le=limits.new_tokens),
        min_length=bounded(int, "min_length", ge=0, le=limits.new_tokens),
        min_new_tokens=(int | None, Field(None, ge=0, le=limits.new_tokens)),
        do_sample=bounded(bool, "do_sample"),
        temperature=bounded(float, "temperature", gt=0, le=10),
        top_k=bounded(int, "top_k", ge=0, le=100_000),
        top_p=bounded(float, "top_p", gt=0, le=1),
        min_p=bounded(float, "min_p", ge=0, le=1),
        typical_p=bounded(float, "typical_p", gt=0, le=1),
        repetition_penalty=bounded(float, "repetition_penalty", gt=0, le=10),
        no_repeat_ngram_size=bounded(int, "no_repeat_ngram_size", ge=0, le=100),
    )


def sampling_options(request: BaseModel) -> dict[str, Any]:
    """The request's options for `TextEngine.generate`, the seed drawn where it was left open, and
    one text where greedy decoding was asked for and no number.

    Raises:
        UserError: several texts of greedy decoding.
    """
    options = request.model_dump(exclude={"prompt", "stream"})
    if not options["do_sample"]:
        if "num_return_sequences" not in request.model_fields_set:
            options["num_return_sequences"] = 1
        if options["num_return_sequences"] > 1:
            raise UserError(
                f"num_return_sequences is {options['num_return_sequences']}, but greedy decoding "
                "(do_sample: false) has one text for a prompt: leave one of the two out"
            )
    if options["seed"] is None:
        options["seed"] = random.SystemRandom().randrange(SEED_BOUND)
    return options
