"""Prompts of different lengths as one batch, the sequences that are being generated, when each is
finished and why, and what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation.options import GenerationOptions


@dataclass(frozen=True)
class Rows:
    """R sequences side by side, all ending in the last column.

    `ids` is (R, T) int64, padded on the left; the others are (R,) int64, `limits` the longest
    length that each may have and `prompts` the number of its prompt.
    """

    ids: np.ndarray
    padding: np.ndarray
    prompt_lengths: np.ndarray
    limits: np.ndarray
    prompts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """(R,) int64, tokens of each sequence so far, without padding."""
        return self.ids.shape[1] - self.padding

    def tokens(self) -> list[list[int]]:
        """Those of each sequence, without padding."""
        return [ids[padding:].tolist() for ids, padding in zip(self.ids, self.padding, strict=True)]

    def select(self, rows: np.ndarray) -> Rows:
        return Rows(*(array[rows] for array in vars(self).values()))

    def append(self, tokens: np.ndarray) -> Rows:
        ids = np.concatenate([self.ids, tokens[:, None]], axis=1)
        return replace(self, ids=ids)


def prepare(
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    vocab_size: int,
    max_positions: int,
) -> Rows:
    """Check prompts and options against the model (UserError), and put the prompts side by side.
    The limit of each follows from `max_new_tokens` or `max_length`, and the model's positions."""
    if len(prompts) == 0:
        raise UserError("there is no prompt to continue")
    _check_ids(options, vocab_size)
    if isinstance(options.seed, tuple) and len(options.seed) != len(prompts):
        raise UserError(f"{len(options.seed)} seeds were given for {len(prompts)} prompts")
    tokens = [_tokens(number, prompt, options, vocab_size) for number, prompt in enumerate(prompts)]
    lengths = np.array([len(row) for row in tokens], dtype=np.int64)
    width = int(lengths.max())
    ids = np.full((len(prompts), width), options.pad_token_id, dtype=np.int64)
    for row, prompt in zip(ids, tokens, strict=True):
        row[width - len(prompt) :] = prompt
    if options.max_new_tokens is not None:
        limits = lengths + options.max_new_tokens
    else:
        limits = np.full(len(prompts), options.max_length, dtype=np.int64)
    limits = np.minimum(limits, max_positions)
    for number, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        if length >= max_positions:
            raise UserError(
                f"prompt {number} has {length} tokens and the model has {max_positions} positions, "
                "so no token can follow; shorten the prompt"
            )
        if length >= limit:
            raise UserError(
                f"prompt {number} has {length} tokens, but max_length, which counts the prompt, is "
                f"{limit}; raise max_length, or set max_new_tokens"
            )
    return Rows(ids, width - lengths, lengths, limits, np.arange(len(prompts)))


def _tokens(
    number: int, prompt: Sequence[int], options: GenerationOptions, vocab_size: int
) -> np.ndarray:
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        if options.bos_token_id is None:
            raise UserError(f"prompt {number} is empty and bos_token_id is null")
        tokens = np.array([options.bos_token_id], dtype=np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f"prompt {number} is not a list of token ids: {prompt!r:.80}")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise UserError(
            f"prompt {number} holds the token id {outside[0]}; the model's vocabulary has the ids "
            f"0 to {vocab_size - 1}: is this the tokenizer that the model was trained with?"
        )
    return tokens.astype(np.int64)


def _check_ids(options: GenerationOptions, vocab_size: int) -> None:
    """Ids that are fed to the model must be in the vocabulary. `eos_token_id` need not be: one that
    the model cannot produce ends nothing."""
    for name in ("pad_token_id", "forced_bos_token_id", "forced_eos_token_id"):
        value = getattr(options, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and item >= vocab_size:
                raise UserError(
                    f"{name} is {item}, but the model's vocabulary has {vocab_size} tokens"
                )


# A sequence ends by its own end of sequence, the length asked for, the model's last position,
# max_time, a stopping criterion of the caller, what is told its tokens ("stop"), or because nobody
# wants it any more ("cancelled").
FinishReason = Literal["eos", "length", "positions", "time", "criterion", "stop", "cancelled"]


class TokenScore(NamedTuple):
    """Log probability of a token as the model gives it, before all processors, and the likeliest
    tokens with theirs, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class GeneratedSequence:
    """One sequence: prompt and new tokens, with the end of sequence, without padding.

    `score`, of beam search only, is the sum of log probabilities / new tokens ** length_penalty.
    `step_scores` (new tokens, V) float32, with `output_scores` and without beams, are the scores
    that each token was chosen from, after all processors.
    """

    prompt: int
    tokens: list[int]
    prompt_length: int
    finish_reason: FinishReason
    score: float | None = None
    step_scores: np.ndarray | None = None

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class Generation:
    """All sequences: those of the first prompt, best one first in beam search, then the next's."""

    sequences: list[GeneratedSequence]


Clock = Callable[[], float]


class Stopping:
    """The rules of one call of `generate`; its time starts when this is made. All processes must be
    told the same time by `clock`, in seconds, or some stop while others wait for them."""

    def __init__(self, options: GenerationOptions, max_positions: int, clock: Clock) -> None:
        self._options = options
        self._ends = set(options.end_ids.tolist())
        self._max_positions = max_positions
        self._clock = clock
        self._started = clock() if options.max_time is not None else 0.0

    def reasons(self, rows: Rows, scores: np.ndarray | None) -> list[FinishReason | None]:
        """Why each of R `rows`, whose last tokens are new, is finished; None where it is not.
        `scores` (R, V) float32 are None in beam search. A criterion's result of a wrong shape is a
        UserError."""
        options, count = self._options, len(rows.ids)
        full = rows.lengths >= rows.limits
        # The model's last place counts as such only where it cuts off what was asked for.
        wanted = rows.prompt_lengths + (options.max_new_tokens or 0)
        if options.max_new_tokens is None:
            wanted = np.full(count, options.max_length)
        stopped = self._criteria(rows, scores)
        limit = options.max_time
        late = limit is not None and self._clock() - self._started > limit
        # The first that holds counts.
        ends: dict[FinishReason, np.ndarray] = {
            "eos": np.array([token in self._ends for token in rows.ids[:, -1].tolist()]),
            "positions": full & (wanted > self._max_positions),
            "length": full,
            "criterion": stopped,
            "time": np.full(count, late),
        }
        return [next((why for why, those in ends.items() if those[i]), None) for i in range(count)]

    def _criteria(self, rows: Rows, scores: np.ndarray | None) -> np.ndarray:
        count = len(rows.ids)
        stopped = np.zeros(count, dtype=bool)
        for criterion in self._options.stopping_criteria:
            answer = np.asarray(criterion(rows.ids, scores))
            if answer.shape not in ((), (count,)):
                raise UserError(
                    f"a stopping criterion returned the shape {answer.shape}; it must return one "
                    f"bool, or one for each of the {count} sequences"
                )
            stopped |= answer.astype(bool)
        return stopped
