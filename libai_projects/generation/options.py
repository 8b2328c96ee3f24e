"""The parameters of `generate`: defaults, checks, and which way of decoding they choose."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oneflow_accel.errors import UserError

import numpy as np

# (token ids (B, T) with padding on the left, scores (B, vocabulary)) -> scores of the same shape.
LogitsProcessor = Callable[[np.ndarray, np.ndarray], np.ndarray]
# (token ids (B, T) with the newest token last, this step's scores (B, vocabulary), or None in beam
# search) -> whether to stop, one bool for all or (B,) bools.
StoppingCriterion = Callable[[np.ndarray, "np.ndarray | None"], "bool | np.ndarray"]
# (number of the prompt, its token ids so far, without padding) -> token ids that may come next.
PrefixFunction = Callable[[int, np.ndarray], "Sequence[int]"]

Mode = Literal["greedy", "sampling", "beam search", "beam sampling"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What to generate; the names and defaults are those that users of transformers know.

    A length counts the prompt, and counts a prompt's own tokens only, never its padding: a batch
    gives what its prompts give one by one.

    Attributes:
        max_length: longest sequence, prompt included.
        max_new_tokens: most new tokens; takes precedence over `max_length`. Either way generation
            stops where the model has no more positions.
        min_length: end of sequence cannot come while the sequence is shorter than this.
        min_new_tokens: end of sequence cannot be among the first so many new tokens; takes
            precedence over `min_length`.
        do_sample: draw tokens; else the likeliest one.
        num_beams: > 1 for beam search.
        early_stopping: beam search only. True stops as soon as `num_beams` sequences are finished;
            False when a better one is unlikely, judged at the present length; "never" when there
            can be no better one.
        num_beam_groups, diversity_penalty: diverse beam search, which is not implemented: anything
            but the default is refused.
        temperature, top_k, top_p, min_p, typical_p: sampling only, applied in this order. top_k 0,
            top_p 1, min_p 0 and typical_p 1 switch them off.
        repetition_penalty: > 1 makes tokens that occurred less likely; 1 switches it off.
        length_penalty: beam search only; a finished sequence's score is the sum of its log
            probabilities divided by (new tokens ** length_penalty).
        no_repeat_ngram_size: no n-gram of this size occurs twice; 0 switches it off.
        bad_words_ids: sequences of token ids that never occur; one that is the end of sequence
            alone is left out.
        suppress_tokens: token ids that are never chosen.
        num_return_sequences: sequences for each prompt.
        max_time: seconds after which no further token is generated.
        use_cache: keep keys and values between steps; the tokens are the same without, slower.
        bos_token_id: starts an empty prompt.
        pad_token_id: fills rows up; never part of a result's sequences.
        eos_token_id: one id or several; any of them ends a sequence. None: only a limit does.
        forced_bos_token_id: the token after a prompt of one token.
        forced_eos_token_id: the token at the last place that the limit allows; one or several.
        remove_invalid_values: replace NaN by 0 and infinities by the largest finite numbers.
        exponential_decay_length_penalty: (start, factor): from `start` new tokens on, the end gains
            `abs(logit) * (factor ** tokens beyond start - 1)`.
        renormalize_logits: make the final scores log probabilities.
        output_scores: keep the scores of each step (vocabulary-sized: mind the memory).
        prefix_allowed_tokens_fn, logits_processor, stopping_criteria: functions of the caller.
        seed: of sampling. One number: prompt i has the seed `seed + i`; or one for each prompt.
            With its own seed a prompt gives alone what it gives in a batch. Every process of a
            distributed run is given the same.
    """

    max_length: int = 20
    max_new_tokens: int | None = None
    min_length: int = 0
    min_new_tokens: int | None = None
    do_sample: bool = False
    early_stopping: bool | Literal["never"] = False
    num_beams: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float | None = 1.0
    min_p: float | None = None
    typical_p: float | None = 1.0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    num_return_sequences: int = 1
    max_time: float | None = None
    use_cache: bool = True
    bos_token_id: int | None = 50256
    pad_token_id: int = 0
    eos_token_id: int | tuple[int, ...] | None = 50256
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    renormalize_logits: bool = False
    output_scores: bool = False
    prefix_allowed_tokens_fn: PrefixFunction | None = None
    logits_processor: tuple[LogitsProcessor, ...] = ()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    seed: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        _refuse_contradictions(self)

    # The first arguments are positional only: any name may come as an option, "self" too.
    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None = None, /, **overrides: Any
    ) -> GenerationOptions:
        """The options of a configuration file, changed by those of one call.

        Args:
            config: options by name, a dict or an omegaconf node; missing ones have the defaults.
            overrides: options that differ in this call.

        Raises:
            UserError: a name that does not exist (the nearest one is named), a value of the wrong
                type or out of range, options that contradict each other.
        """
        named = {str(name): value for name, value in (config or {}).items()}
        named.update(overrides)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean '{near[0]}'?" if near else f"options are {', '.join(known)}"
                raise UserError(f"there is no generation option {name!r:.80}: {hint}")
        return cls(**named)

    def replace(self, /, **overrides: Any) -> GenerationOptions:
        """These options with some changed. Raises what `from_config` raises."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self.from_config(own, **overrides)

    @property
    def mode(self) -> Mode:
        """How tokens are chosen."""
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


# Rules: (name, value) -> the value as it is stored, or a UserError.
_Rule = Callable[[str, Any], Any]
# Of lengths, counts and ids: they are added up in int64.
_LARGEST = 2**31 - 1
# Scores are float32, in which a number below this one is 0 or has lost digits.
_SMALLEST = float(np.finfo(np.float32).tiny)
# Beyond these a penalty decides alone, whatever the model says, and scores overflow.
_PENALTIES = (1e-6, 1e6)
_LENGTH_PENALTIES = (-100, 100)


def _wrong(name: str, wanted: str, value: Any) -> UserError:
    return UserError(f"generation option '{name}' must be {wanted}, got {value!r:.80}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _integer(low: int) -> _Rule:
    def rule(name: str, value: Any) -> int:
        if not _is_integer(value) or value < low:
            raise _wrong(name, f"a whole number of at least {low}", value)
        if value > _LARGEST:
            raise _wrong(name, f"a whole number of at most {_LARGEST}", value)
        return int(value)

    return rule


def _number(wanted: str, accept: Callable[[float], bool]) -> _Rule:
    def rule(name: str, value: Any) -> float:
        number = math.nan
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            # A whole number may be too large for a float.
            with contextlib.suppress(OverflowError):
                number = float(value)
        if not math.isfinite(number) or not accept(number):
            raise _wrong(name, wanted, value)
        return number

    return rule


def _between(low: float, high: float) -> _Rule:
    return _number(f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _wrong(name, "true or false", value)
    return bool(value)


def _optional(rule: _Rule) -> _Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _one_or_several(most: float, wanted: str) -> _Rule:
    def fits(item: Any) -> bool:
        return _is_integer(item) and 0 <= item <= most

    def rule(name: str, value: Any) -> int | tuple[int, ...]:
        if fits(value):
            return int(value)
        several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        if several and len(value) and all(fits(item) for item in value):
            return tuple(int(item) for item in value)
        raise _wrong(name, wanted, value)

    return rule


def _ids_or_none(name: str, value: Any) -> tuple[int, ...]:
    if value is None or (isinstance(value, Sequence) and not value):
        return ()
    ids = _IDS(name, value)
    return (ids,) if isinstance(ids, int) else ids


def _words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(name, "a list of lists of token ids", value)
    words = [() if _is_integer(item) else _ids_or_none(name, item) for item in value]
    if () in words:
        raise _wrong(name, "a list of lists of token ids, none of them empty", value)
    return tuple(words)


def _decay(name: str, value: Any) -> tuple[int, float]:
    wanted = "(new tokens after which it starts, factor above 0)"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise _wrong(name, wanted, value)
    start, factor = value
    try:
        return _integer(0)(name, start), _POSITIVE(name, factor)
    except UserError:
        raise _wrong(name, wanted, value) from None


def _function(name: str, value: Any) -> Any:
    if not callable(value):
        raise _wrong(name, "a function", value)
    return value


def _functions(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    items = (value,) if callable(value) else value
    if not isinstance(items, Sequence) or not all(callable(item) for item in items):
        raise _wrong(name, "a list of functions", value)
    return tuple(items)


def _early_stopping(name: str, value: Any) -> bool | str:
    if value == "never" and isinstance(value, str):
        return value
    try:
        return _flag(name, value)
    except UserError:
        raise _wrong(name, "true, false or 'never'", value) from None


_POSITIVE = _number("a number above 0", lambda value: value > 0)
_IDS = _one_or_several(_LARGEST, f"a number from 0 to {_LARGEST} or a list of them")
_SEEDS = _one_or_several(math.inf, "a number of at least 0 or a list of them")
_SHARE = _optional(_number("a number above 0 and at most 1", lambda value: 0 < value <= 1))
_RULES: dict[str, _Rule] = {
    "max_length": _integer(1),
    "max_new_tokens": _optional(_integer(1)),
    "min_length": _integer(0),
    "min_new_tokens": _optional(_integer(0)),
    "do_sample": _flag,
    "early_stopping": _early_stopping,
    "num_beams": _integer(1),
    "num_beam_groups": _integer(1),
    "diversity_penalty": _number("a number", lambda value: True),
    "temperature": _number(
        f"a number above 0, {_SMALLEST:.3g} or more (for the likeliest token at each step set "
        "do_sample to false)",
        lambda value: value >= _SMALLEST,
    ),
    "top_k": _optional(_integer(0)),
    "top_p": _SHARE,
    "min_p": _optional(_number("a number from 0 to 1", lambda value: 0 <= value <= 1)),
    "typical_p": _SHARE,
    "repetition_penalty": _between(*_PENALTIES),
    "length_penalty": _between(*_LENGTH_PENALTIES),
    "no_repeat_ngram_size": _integer(0),
    "bad_words_ids": _words,
    "suppress_tokens": _ids_or_none,
    "num_return_sequences": _integer(1),
    "max_time": _optional(_POSITIVE),
    "use_cache": _flag,
    "bos_token_id": _optional(_integer(0)),
    "pad_token_id": _integer(0),
    "eos_token_id": _optional(_IDS),
    "forced_bos_token_id": _optional(_integer(0)),
    "forced_eos_token_id": _optional(_IDS),
    "remove_invalid_values": _flag,
    "exponential_decay_length_penalty": _optional(_decay),
    "renormalize_logits": _flag,
    "output_scores": _flag,
    "prefix_allowed_tokens_fn": _optional(_function),
    "logits_processor": _functions,
    "stopping_criteria": _functions,
    "seed": _SEEDS,
}


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
