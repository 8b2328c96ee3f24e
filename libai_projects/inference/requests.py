"""The body of POST /api/generate: its fields, their bounds and their defaults."""

from __future__ import annotations

import random
from typing import Annotated, Any, get_args

from oneflow_accel.errors import UserError

from pydantic import BaseModel, Field, create_model, field_validator

from flow_train.config.schema import Group, described
from libai_projects.generation.options import PLAIN, GenerationOptions


@described
class Limits(Group, frozen=True):
    """Upper bounds; a request beyond one is refused before it reaches the model.

    `seconds` go from a request's arrival to its last token, waiting included; `arrival_seconds`
    from a connection's opening to the end of a request's head, and from there to the end of its
    body; `queue` counts the requests that wait, `texts` what is written for those that do not.
    """

    request_bytes: int = 16_384
    "most bytes of a request"
    prompt_tokens: int = 256
    "most tokens of a prompt"
    new_tokens: int = 256
    "most new tokens for each text"
    returns: int = 8
    "most texts for each request"
    texts: int = 64
    "most texts that are written at once"
    queue: int = 16
    "most requests that may wait"
    seconds: float = 60.0
    "longest time for a request, waiting included"
    arrival_seconds: float = 10.0
    "longest time for a request's head to arrive, and for its body"


# The options of a request. Some defaults are the page's own: four different prompts, of a useful
# length.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "num_return_sequences": 4,
    "max_new_tokens": 60,
    "do_sample": True,
    "top_p": 0.95,
    "min_p": 0.0,
    **GenerationOptions().model_dump(
        include={
            *("temperature", "top_k", "typical_p", "repetition_penalty"),
            *("no_repeat_ngram_size", "min_length"),
        }
    ),
}
# The most of those that GenerationOptions takes more of.
_MOST = {
    "temperature": 10,
    "top_k": 100_000,
    "repetition_penalty": 10,
    "no_repeat_ngram_size": 100,
}
SEED_BOUND = 2**31


def new_seed() -> int:
    return random.SystemRandom().randrange(SEED_BOUND)


class _GenerateRequest(Group):
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
        **_MOST,
        "num_return_sequences": limits.returns,
        "max_new_tokens": limits.new_tokens,
        "min_length": limits.new_tokens,
    }
    fields: dict[str, Any] = {}
    for name, default in SAMPLING_DEFAULTS.items():
        field = GenerationOptions.model_fields[name]
        parts = get_args(field.rebuild_annotation())
        # A request says null of none of them.
        kind, *bounds = get_args(parts[0]) or parts
        if name in most:
            default = min(default, most[name])
            # Of two such bounds the last counts, and the schema has none behind a validator.
            bounds.insert(bounds.index(PLAIN), Field(le=most[name]))
        kind = Annotated[(kind, *bounds)]
        fields[name] = (kind, Field(default, description=field.description))
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
        options["seed"] = new_seed()
    return options
