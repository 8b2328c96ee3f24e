"""The body of POST /api/generate: its fields, their bounds and their defaults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator


@dataclass(frozen=True)
class Limits:
    """Upper bounds; a request beyond one is refused before it reaches the model.

    `seconds` go from a request's arrival to its last token, waiting included; `arrival_seconds`
    from a connection's opening to the end of a request's head, and from there to the end of its
    body; `queue` counts the requests that wait while one runs.
    """

    request_bytes: int = 16_384
    prompt_tokens: int = 256
    new_tokens: int = 256
    returns: int = 8
    seconds: float = 60.0
    arrival_seconds: float = 10.0
    queue: int = 16


# Type, default and bounds of each option that a request may give. The defaults are the page's own:
# four different prompts, of a useful length.
_OPTIONS: dict[str, tuple[type, Any, dict[str, float]]] = {
    "num_return_sequences": (int, 4, {"ge": 1}),
    "max_new_tokens": (int, 60, {"ge": 1}),
    "do_sample": (bool, True, {}),
    "temperature": (float, 1.0, {"gt": 0, "le": 10}),
    "top_k": (int, 50, {"ge": 0, "le": 100_000}),
    "top_p": (float, 0.95, {"gt": 0, "le": 1}),
    "min_p": (float, 0.0, {"ge": 0, "le": 1}),
    "typical_p": (float, 1.0, {"gt": 0, "le": 1}),
    "repetition_penalty": (float, 1.0, {"gt": 0, "le": 10}),
    "no_repeat_ngram_size": (int, 0, {"ge": 0, "le": 100}),
    "min_length": (int, 0, {"ge": 0}),
}
SAMPLING_DEFAULTS = {name: default for name, (_, default, _) in _OPTIONS.items()}
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
    most = {
        "num_return_sequences": limits.returns,
        "max_new_tokens": limits.new_tokens,
        "min_length": limits.new_tokens,
    }
    fields: dict[str, Any] = {}
    for name, (kind, default, bounds) in _OPTIONS.items():
        if name in most:
            default, bounds = min(default, most[name]), {**bounds, "le": most[name]}
        fields[name] = (kind, Field(default, **bounds))
    return create_model(
        "GenerateRequest",
        __base__=_GenerateRequest,
        prompt=(str, Field(max_length=limits.request_bytes)),
        stream=(bool, False),
        # An absent seed is drawn; the answer says which it was.
        seed=(int | None, Field(None, ge=0, lt=SEED_BOUND)),
        min_new_tokens=(int | None, Field(None, ge=0, le=limits.new_tokens)),
        **fields,
    )


def sampling_options(request: BaseModel) -> dict[str, Any]:
    """The request's options for `TextPipeline.generate`, the seed drawn where it was left open, and
    one text for greedy decoding; several of it are a UserError."""
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
