"""The parameters of `generate`: one table of defaults, checks and texts, of which the command line
is made, too; and the way of decoding that they choose."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oneflow_accel.errors import UserError, nearest

import numpy as np

# (token ids (B, T) with padding on the left, scores (B, vocabulary)) -> scores of the same shape.
LogitsProcessor = Callable[[np.ndarray, np.ndarray], np.ndarray]
# (token ids (B, T) with the newest token last, this step's scores (B, vocabulary), or None in beam
# search) -> whether to stop, one bool for all or (B,) bools.
StoppingCriterion = Callable[[np.ndarray, "np.ndarray | None"], "bool | np.ndarray"]
# (number of the prompt, its token ids so far, without padding) -> token ids that may come next.
PrefixFunction = Callable[[int, np.ndarray], "Sequence[int]"]

Mode = Literal["greedy", "sampling", "beam search", "beam sampling"]


@dataclass(frozen=True)
class Kind:
    """What values an option takes, `wanted` in words. `convert` gives what is stored, or raises a
    ValueError, whose text, if any, says better what is wanted; `parse` reads a command line's text
    or raises a ValueError, None if it cannot be given there."""

    wanted: str
    convert: Callable[[Any], Any]
    parse: Callable[[str], Any] | None = None

    def check(self, name: str, value: Any) -> Any:
        """What is stored, or a UserError."""
        try:
            return self.convert(value)
        except ValueError as error:
            wanted = str(error) or self.wanted
            raise UserError(
                f"generation option '{name}' must be {wanted}, got {value!r:.80}"
            ) from None


# Lengths, counts and ids are at most this, so that their sums fit into int64.
_LARGEST = 2**31 - 1
# Scores are float32, in which a number below this one is 0 or has lost digits.
_SMALLEST = float(np.finfo(np.float32).tiny)
# Beyond these a penalty decides alone, whatever the model says, and scores overflow.
_PENALTIES = (1e-6, 1e6)
_LENGTH_PENALTIES = (-100, 100)


def _is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and least <= value <= most


def _integer(low: int) -> Kind:
    def convert(value: Any) -> int:
        if _is_integer(value, _LARGEST + 1):
            raise ValueError(f"a whole number of at most {_LARGEST}")
        if not _is_integer(value, low):
            raise ValueError
        return int(value)

    return Kind(f"a whole number of at least {low}", convert, _whole_number)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _number(wanted: str, accept: Callable[[float], bool]) -> Kind:
    def convert(value: Any) -> float:
        number = math.nan
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            # A whole number may be too large for a float.
            with contextlib.suppress(OverflowError):
                number = float(value)
        if not math.isfinite(number) or not accept(number):
            raise ValueError
        return number

    return Kind(wanted, convert, _float)


def _between(low: float, high: float) -> Kind:
    return _number(f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def _optional(kind: Kind) -> Kind:
    return dataclasses.replace(
        kind, convert=lambda value: None if value is None else kind.convert(value)
    )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError
    return bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _one_or_several(most: float, wanted: str) -> Kind:
    def convert(value: Any) -> int | tuple[int, ...]:
        if _is_integer(value, 0, most):
            return int(value)
        several = _is_list(value) or isinstance(value, np.ndarray)
        if not several or not len(value) or not all(_is_integer(x, 0, most) for x in value):
            raise ValueError
        return tuple(map(int, value))

    return Kind(wanted, convert, _several)


def _several(text: str) -> int | tuple[int, ...]:
    ids = tuple(map(_whole_number, text.split(",")))
    return ids[0] if len(ids) == 1 else ids


def _ids_or_none(value: Any) -> tuple[int, ...]:
    if value is None or (isinstance(value, Sequence) and not value):
        return ()
    ids = _IDS.convert(value)
    return (ids,) if isinstance(ids, int) else ids


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    if value is not None and not _is_list(value):
        raise ValueError
    words = [() if _is_integer(item) else _ids_or_none(item) for item in value or ()]
    if () in words:
        raise ValueError(f"{_WORDS.wanted}, none of them empty")
    return tuple(words)


def _decay(value: Any) -> tuple[int, float]:
    if not _is_list(value) or len(value) != 2:
        raise ValueError
    return _integer(0).convert(value[0]), _POSITIVE.convert(value[1])


def _start_and_factor(text: str) -> tuple[int, float]:
    start, comma, factor = text.partition(",")
    if not comma:
        raise ValueError(f"{text!r} is not START,FACTOR, such as 20,1.05")
    return _whole_number(start), _float(factor)


def _functions(value: Any) -> tuple[Any, ...]:
    items = () if value is None else (value,) if callable(value) else value
    if not isinstance(items, Sequence) or not all(callable(item) for item in items):
        raise ValueError
    return tuple(items)


def _function(value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError
    return value


def _early_stopping(value: Any) -> bool | str:
    return value if isinstance(value, str) and value == "never" else _flag(value)


def _early(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise ValueError(f"{text!r} is not true, false or never")
    return values[text]


_POSITIVE = _number("a number above 0", lambda value: value > 0)
_IDS = _one_or_several(_LARGEST, f"a number from 0 to {_LARGEST} or a list of them")
_SEEDS = _one_or_several(math.inf, "a number of at least 0 or a list of them")
_SHARE = _optional(_number("a number above 0 and at most 1", lambda value: 0 < value <= 1))
_FLAG = Kind("true or false", _flag)
_TEMPERATURE = _number(
    f"a number above 0, {_SMALLEST:.3g} or more (for the likeliest token at each step set "
    "do_sample to false)",
    lambda value: value >= _SMALLEST,
)
_PART = _optional(_number("a number from 0 to 1", lambda value: 0 <= value <= 1))
_WORDS = Kind(
    "a list of lists of token ids",
    _words,
    lambda text: [tuple(map(_whole_number, x.split(","))) for x in text.split(";")],
)
_ID, _END_IDS = _optional(_integer(0)), _optional(_IDS)
_FUNCTIONS = Kind("a list of functions", _functions)
_DECAY = _optional(
    Kind("(new tokens after which it starts, factor above 0)", _decay, _start_and_factor)
)


def _option(default: Any, kind: Kind, text: str = "") -> Any:
    """A field of GenerationOptions; one without a text is for callers in Python only."""
    return field(default=default, metadata={"kind": kind, "text": text})


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What to generate; the names and defaults are those that users of transformers know.

    A length counts the prompt's own tokens and never its padding: a batch gives what its prompts
    give one by one. Generation also stops where the model has no more positions. What works on
    sampling is applied in the order of the fields. An end of sequence alone is left out of
    `bad_words_ids`. `exponential_decay_length_penalty` adds `abs(logit) * (factor ** tokens beyond
    start - 1)` to the end's score. One number as `seed` gives prompt i the seed `seed + i`; several
    are one each.
    """

    max_length: int = _option(20, _integer(1), "longest text in tokens, prompt included")
    max_new_tokens: int | None = _option(
        None, _optional(_integer(1)), "most new tokens; takes precedence over --max-length"
    )
    min_length: int = _option(
        0, _integer(0), "no end of text while it is shorter than this, in tokens, prompt included"
    )
    min_new_tokens: int | None = _option(
        None,
        _optional(_integer(0)),
        "no end of text among the first so many new tokens; instead of --min-length",
    )
    do_sample: bool = _option(False, _FLAG, "draw tokens instead of taking the likeliest")
    early_stopping: bool | Literal["never"] = _option(
        False,
        Kind("true, false or 'never'", _early_stopping, _early),
        "when beam search ends: true (as many texts as beams are finished), false (a better one is "
        "unlikely), never (a better one is impossible)",
    )
    num_beams: int = _option(1, _integer(1), "beams of beam search; 1: none")
    num_beam_groups: int = _option(
        1, _integer(1), "diverse beam search, which is not implemented: 1 only"
    )
    diversity_penalty: float = _option(
        0.0,
        _number("a number", lambda value: True),
        "diverse beam search, which is not implemented: 0 only",
    )
    temperature: float = _option(
        1.0, _TEMPERATURE, "sampling: below 1 sharpens the distribution, above 1 flattens it"
    )
    top_k: int | None = _option(
        50, _optional(_integer(0)), "sampling: from the k likeliest tokens only; 0: all"
    )
    top_p: float | None = _option(
        1.0,
        _SHARE,
        "sampling: from the likeliest tokens that together have this probability; 1: all",
    )
    min_p: float | None = _option(
        None,
        _PART,
        "sampling: from the tokens with this share of the likeliest one's probability; 0: all",
    )
    typical_p: float | None = _option(
        1.0,
        _SHARE,
        "sampling: from the most typical tokens that together have this probability; 1: all",
    )
    repetition_penalty: float = _option(
        1.0, _between(*_PENALTIES), "above 1: tokens that occurred become less likely"
    )
    length_penalty: float = _option(
        1.0,
        _between(*_LENGTH_PENALTIES),
        "beam search: a text's score is divided by its new tokens to this power",
    )
    no_repeat_ngram_size: int = _option(
        0, _integer(0), "no n-gram of this size occurs twice; 0: off"
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = _option(
        (), _WORDS, "sequences of token ids that never occur, as 1,2;3"
    )
    suppress_tokens: tuple[int, ...] = _option(
        (), Kind(_IDS.wanted, _ids_or_none, _several), "token ids that are never chosen, as 1,2"
    )
    num_return_sequences: int = _option(1, _integer(1), "texts for each prompt")
    max_time: float | None = _option(
        None, _optional(_POSITIVE), "seconds after which no further token is generated"
    )
    use_cache: bool = _option(
        True, _FLAG, "keep keys and values between tokens: the same text, faster"
    )
    bos_token_id: int | None = _option(50256, _ID, "starts an empty prompt")
    pad_token_id: int = _option(0, _integer(0), "fills a batch up")
    eos_token_id: int | tuple[int, ...] | None = _option(
        50256, _END_IDS, "ends a text; several as 1,2"
    )
    forced_bos_token_id: int | None = _option(
        None, _ID, "the first token after a prompt of one token"
    )
    forced_eos_token_id: int | tuple[int, ...] | None = _option(
        None, _END_IDS, "the last token where the length ends a text; several as 1,2"
    )
    remove_invalid_values: bool = _option(False, _FLAG, "replace NaN and infinite scores")
    exponential_decay_length_penalty: tuple[int, float] | None = _option(
        None,
        _DECAY,
        "START,FACTOR: from START new tokens on the end of the text becomes likelier by FACTOR",
    )
    renormalize_logits: bool = _option(False, _FLAG, "make the final scores log probabilities")
    # The scores of each step are as large as the vocabulary and take much memory.
    output_scores: bool = _option(False, _FLAG)
    prefix_allowed_tokens_fn: PrefixFunction | None = _option(  # noqa: RUF009 - a field
        None, Kind("a function", _function)
    )
    logits_processor: tuple[LogitsProcessor, ...] = _option((), _FUNCTIONS)
    stopping_criteria: tuple[StoppingCriterion, ...] = _option((), _FUNCTIONS)
    seed: int | tuple[int, ...] = _option(0, _SEEDS, "seed of sampling")

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = each.metadata["kind"].check(each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
        _refuse_contradictions(self)

    # The first arguments are positional only: any name may come as an option, "self" too.
    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None = None, /, **overrides: Any
    ) -> GenerationOptions:
        """The options by name in `config`, a dict or omegaconf node, changed by `overrides`. Raises
        UserError for an unknown name (naming the nearest), a wrong value, or a contradiction."""
        named = {str(name): value for name, value in (config or {}).items()}
        named.update(overrides)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in named:
            if name not in known:
                near = nearest(name, known, cutoff=0.5)
                hint = f"did you mean '{near[0]}'?" if near else f"options are {', '.join(known)}"
                raise UserError(f"there is no generation option {name!r:.80}: {hint}")
        return cls(**named)

    def replace(self, /, **overrides: Any) -> GenerationOptions:
        """These options with some changed. Raises what `from_config` raises."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self.from_config(own, **overrides)

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


def _refuse_contradictions(options: GenerationOptions) -> None:
    returns, beams = options.num_return_sequences, options.num_beams
    if options.num_beam_groups > 1 or options.diversity_penalty != 0:
        raise UserError(
            "diverse (group) beam search is not implemented: leave num_beam_groups at 1 and "
            "diversity_penalty at 0; do_sample=true with num_beams > 1 also gives varied beams"
        )
    if returns > 1 and options.mode == "greedy":
        raise UserError(
            f"num_return_sequences is {returns}, but greedy decoding has one result for a prompt; "
            f"set do_sample to true, or num_beams to at least {returns}"
        )
    if beams > 1 and returns > beams:
        raise UserError(
            f"num_return_sequences ({returns}) is larger than num_beams ({beams}); "
            "raise num_beams or ask for fewer sequences"
        )
    if options.max_new_tokens is None and options.min_length > options.max_length:
        raise UserError(
            f"min_length ({options.min_length}) is larger than max_length ({options.max_length})"
        )
    least, most = options.min_new_tokens, options.max_new_tokens
    if least is not None and most is not None and least > most:
        raise UserError(f"min_new_tokens ({least}) is larger than max_new_tokens ({most})")
    decay = options.exponential_decay_length_penalty
    if decay is not None and options.eos_token_id is None:
        raise UserError(
            "exponential_decay_length_penalty favors the end of sequence, but eos_token_id is null"
        )
