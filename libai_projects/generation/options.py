"""The options of `generate`, each with its range, default and text, of which the command line, the
server's request and the config are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from oneflow_accel.errors import UserError, nearest

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from flow_train.config.schema import Group, Schema, Wanted, described

# (token ids (B, T) with padding on the left, scores (B, vocabulary)) -> scores of the same shape.
LogitsProcessor = Callable[[np.ndarray, np.ndarray], np.ndarray]
# (token ids (B, T) with the newest token last, this step's scores (B, vocabulary), or None in beam
# search) -> whether to stop, one bool for all or (B,) bools.
StoppingCriterion = Callable[[np.ndarray, "np.ndarray | None"], "bool | np.ndarray"]
# (number of the prompt, its token ids so far, without padding) -> token ids that may come next.
PrefixFunction = Callable[[int, np.ndarray], "Sequence[int]"]

Mode = Literal["greedy", "sampling", "beam search", "beam sampling"]

# Lengths, counts and ids are at most this, so that their sums fit into int64.
_LARGEST = 2**31 - 1
# Scores are float32, in which a number below this one is 0 or has lost digits.
_SMALLEST = float(np.finfo(np.float32).tiny)
_WARM = (
    f"a number above 0, {_SMALLEST:.3g} or more (for the likeliest token at each step set "
    "do_sample to false)"
)


def _warm(value: float) -> float:
    if value < _SMALLEST:
        raise ValueError(f"must be {_WARM}")
    return value


def _several(value: Any) -> Any:
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    return value if is_list else () if value is None else (value,)


_SEVERAL = BeforeValidator(_several)
# NumPy's numbers as Python's.
PLAIN = BeforeValidator(lambda value: value.item() if isinstance(value, np.generic) else value)
Flag = Annotated[bool, PLAIN]
Count = Annotated[int, Field(ge=0, le=_LARGEST), PLAIN]
Positive = Annotated[int, Field(ge=1, le=_LARGEST), PLAIN]
Above0 = Annotated[float, Field(gt=0), PLAIN]
Share = Annotated[float, Field(gt=0, le=1), PLAIN]
Ids = Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
_ID_WORDS = Wanted(f"a number from 0 to {_LARGEST} or a list of them")
EndIds = Annotated[Count | Ids, _ID_WORDS]
Words = Annotated[
    tuple[Ids, ...],
    Field(strict=False),
    _SEVERAL,
    Wanted("a list of lists of token ids, none of them empty"),
]
Decay = Annotated[
    tuple[Count, Above0],
    Field(strict=False),
    Wanted("(new tokens after which it starts, factor above 0)"),
]
_Seed = Annotated[int, Field(ge=0), PLAIN]
Seeds = Annotated[
    _Seed | Annotated[tuple[_Seed, ...], Field(min_length=1, strict=False)],
    Wanted("a number of at least 0 or a list of them"),
]
_F = TypeVar("_F")
Functions = Annotated[tuple[_F, ...], Field(strict=False), _SEVERAL, Wanted("a list of functions")]


@described
class GenerationOptions(Group, frozen=True):
    """What to generate; the names and defaults are those that users of transformers know.

    A length counts the prompt's own tokens and never its padding: a batch gives what its prompts
    give one by one. Generation also stops where the model has no more positions. What works on
    sampling is applied in the order of the fields. An end of sequence alone is left out of
    `bad_words_ids`. `exponential_decay_length_penalty` adds `abs(logit) * (factor ** tokens beyond
    start - 1)` to the end's score. One number as `seed` gives prompt i the seed `seed + i`; several
    are one each.
    """

    max_length: Positive = 20
    "longest text in tokens, prompt included"
    max_new_tokens: Positive | None = None
    "most new tokens; takes precedence over --max-length"
    min_length: Count = 0
    "no end of text while it is shorter than this, in tokens, prompt included"
    min_new_tokens: Count | None = None
    "no end of text among the first so many new tokens; instead of --min-length"
    do_sample: Flag = False
    "draw tokens instead of taking the likeliest"
    early_stopping: Annotated[Flag | Literal["never"], Wanted("true, false or 'never'")] = False
    """when beam search ends: true (as many texts as beams are finished), false (a better one is
    unlikely), never (a better one is impossible)"""
    num_beams: Positive = 1
    "beams of beam search; 1: none"
    num_beam_groups: Positive = 1
    "diverse beam search, which is not implemented: 1 only"
    diversity_penalty: Annotated[float, PLAIN] = 0.0
    "diverse beam search, which is not implemented: 0 only"
    temperature: Annotated[Above0, AfterValidator(_warm), Wanted(_WARM)] = 1.0
    "sampling: below 1 sharpens the distribution, above 1 flattens it"
    top_k: Count | None = 50
    "sampling: from the k likeliest tokens only; 0: all"
    top_p: Share | None = 1.0
    "sampling: from the likeliest tokens that together have this probability; 1: all"
    min_p: Annotated[float, Field(ge=0, le=1), PLAIN] | None = None
    "sampling: from the tokens with this share of the likeliest one's probability; 0: all"
    typical_p: Share | None = 1.0
    "sampling: from the most typical tokens that together have this probability; 1: all"
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1_000_000), PLAIN] = 1.0
    "above 1: tokens that occurred become less likely"
    length_penalty: Annotated[float, Field(ge=-100, le=100), PLAIN] = 1.0
    "beam search: a text's score is divided by its new tokens to this power"
    no_repeat_ngram_size: Count = 0
    "no n-gram of this size occurs twice; 0: off"
    bad_words_ids: Words = ()
    "sequences of token ids that never occur, as 1,2;3"
    suppress_tokens: Annotated[tuple[Count, ...], Field(strict=False), _SEVERAL, _ID_WORDS] = ()
    "token ids that are never chosen, as 1,2"
    stop_strings: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(strict=False),
        _SEVERAL,
        Wanted("a text or a list of them, none of them empty"),
    ] = ()
    "texts after the first of which a text ends; several as a JSON list"
    logprobs: Annotated[int, Field(ge=0, le=20), PLAIN] | None = None
    "log probabilities of each new token and of so many of the likeliest"
    num_return_sequences: Positive = 1
    "texts for each prompt"
    max_time: Above0 | None = None
    "seconds after which no further token is generated"
    use_cache: Flag = True
    "keep keys and values between tokens: the same text, faster"
    bos_token_id: Count | None = 50256
    "starts an empty prompt"
    pad_token_id: Count = 0
    "fills a batch up"
    eos_token_id: EndIds | None = 50256
    "ends a text; several as 1,2"
    forced_bos_token_id: Count | None = None
    "the first token after a prompt of one token"
    forced_eos_token_id: EndIds | None = None
    "the last token where the length ends a text; several as 1,2"
    remove_invalid_values: Flag = False
    "replace NaN and infinite scores"
    exponential_decay_length_penalty: Decay | None = None
    "START,FACTOR: from START new tokens on the end of the text becomes likelier by FACTOR"
    renormalize_logits: Flag = False
    "make the final scores log probabilities"
    seed: Seeds = 0
    "seed of sampling"
    # What has no text is for callers in Python only. The scores of each step are as large as the
    # vocabulary and take much memory.
    output_scores: Flag = False
    prefix_allowed_tokens_fn: Annotated[PrefixFunction, Wanted("a function")] | None = None
    logits_processor: Functions[LogitsProcessor] = ()
    stopping_criteria: Functions[StoppingCriterion] = ()

    # The first arguments are positional only: any name may come as an option, "self" too.
    def __init__(self, /, **values: Any) -> None:
        """Raises UserError for an unknown name (naming the nearest), a wrong value, or a
        contradiction."""
        known = type(self).model_fields
        for name in values:
            if name not in known:
                near = nearest(name, known, cutoff=0.5)
                hint = f"did you mean '{near[0]}'?" if near else f"options are {', '.join(known)}"
                raise UserError(f"there is no generation option {name!r:.80}: {hint}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            name = str(problem["loc"][0])
            wanted = f"must be {Schema(type(self)).wanted(name)}"
            if problem["type"] == "value_error":
                wanted = str(problem["ctx"]["error"])
            raise UserError(
                f"generation option '{name}' {wanted}, got {values[name]!r:.80}"
            ) from None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None = None, /, **overrides: Any
    ) -> GenerationOptions:
        """The options by name in `config`, a dict or omegaconf node, changed by `overrides`. Raises
        what the constructor raises."""
        return cls(**{**{str(name): value for name, value in (config or {}).items()}, **overrides})

    def replace(self, /, **overrides: Any) -> GenerationOptions:
        """These options with some changed. Raises what the constructor raises."""
        return self.from_config(dict(self), **overrides)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> GenerationOptions:
        returns, beams = self.num_return_sequences, self.num_beams
        if self.num_beam_groups > 1 or self.diversity_penalty != 0:
            raise UserError(
                "diverse (group) beam search is not implemented: leave num_beam_groups at 1 and "
                "diversity_penalty at 0; do_sample=true with num_beams > 1 also gives varied beams"
            )
        if returns > 1 and self.mode == "greedy":
            raise UserError(
                f"num_return_sequences is {returns}, but greedy decoding has one result for a "
                f"prompt; set do_sample to true, or num_beams to at least {returns}"
            )
        if beams > 1 and returns > beams:
            raise UserError(
                f"num_return_sequences ({returns}) is larger than num_beams ({beams}); "
                "raise num_beams or ask for fewer sequences"
            )
        if self.max_new_tokens is None and self.min_length > self.max_length:
            raise UserError(
                f"min_length ({self.min_length}) is larger than max_length ({self.max_length})"
            )
        least, most = self.min_new_tokens, self.max_new_tokens
        if least is not None and most is not None and least > most:
            raise UserError(f"min_new_tokens ({least}) is larger than max_new_tokens ({most})")
        if beams > 1 and (self.stop_strings or self.logprobs is not None):
            raise UserError(
                "stop_strings and logprobs are for texts that come token by token: leave them out, "
                "or num_beams at 1"
            )
        decay = self.exponential_decay_length_penalty
        if decay is not None and self.eos_token_id is None:
            raise UserError(
                "exponential_decay_length_penalty favors the end of sequence, but eos_token_id is "
                "null"
            )
        return self

    @property
    def mode(self) -> Mode:
        if self.num_beams > 1:
            return "beam sampling" if self.do_sample else "beam search"
        return "sampling" if self.do_sample else "greedy"

    @property
    def end_ids(self) -> np.ndarray:
        """(n,) int64, the ids that end a sequence."""
        return as_ids(self.eos_token_id)


def as_ids(value: int | tuple[int, ...] | None) -> np.ndarray:
    """(n,) int64 of one id, several or none."""
    if value is None:
        return np.empty(0, dtype=np.int64)
    return np.atleast_1d(np.asarray(value, dtype=np.int64))
