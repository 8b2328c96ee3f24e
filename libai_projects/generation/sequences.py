"""The sequences that are being generated, when each is finished and why, and what is returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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

    def select(self, rows: np.ndarray) -> Rows:
        return Rows(
            self.ids[rows],
            self.padding[rows],
            self.prompt_lengths[rows],
            self.limits[rows],
            self.prompts[rows],
        )

    def append(self, tokens: np.ndarray) -> Rows:
        ids = np.concatenate([self.ids, tokens[:, None]], axis=1)
        return Rows(ids, self.padding, self.prompt_lengths, self.limits, self.prompts)


# A sequence ends by its own end of sequence, the length asked for, the model's last position,
# max_time, or a stopping criterion of the caller.
FinishReason = Literal["eos", "length", "positions", "time", "criterion"]


@dataclass(frozen=True)
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

    def as_array(self, pad_token_id: int) -> np.ndarray:
        """(sequences, T) int64 as of transformers: prompts padded on the left, results on the
        right."""
        widest = max(sequence.prompt_length for sequence in self.sequences)
        ends = [
            widest - sequence.prompt_length + len(sequence.tokens) for sequence in self.sequences
        ]
        array = np.full((len(ends), max(ends)), pad_token_id, dtype=np.int64)
        for row, sequence, end in zip(array, self.sequences, ends, strict=True):
            row[end - len(sequence.tokens) : end] = sequence.tokens
        return array


Clock = Callable[[], float]


class Stopping:
    """The rules of one call of `generate`; its time starts when this is made. All processes must be
    told the same time by `clock`, in seconds, or some stop while others wait for them."""

    def __init__(self, options: GenerationOptions, max_positions: int, clock: Clock) -> None:
        self._options = options
        self._max_positions = max_positions
        self._clock = clock
        self._started = clock() if options.max_time is not None else 0.0

    def reasons(self, rows: Rows, scores: np.ndarray | None) -> list[FinishReason | None]:
        """Why each of R `rows`, whose last tokens are new, is finished; None where it is not.
        `scores` (R, V) float32 are None in beam search. A criterion's result of a wrong shape is a
        UserError."""
        found: list[FinishReason | None] = [None] * len(rows.ids)
        ended = np.isin(rows.ids[:, -1], self._options.end_ids)
        full = rows.lengths >= rows.limits
        # The model's last place counts as such only where it cuts off what was asked for.
        wanted = rows.prompt_lengths + (self._options.max_new_tokens or 0)
        if self._options.max_new_tokens is None:
            wanted = np.full(len(found), self._options.max_length)
        cut = full & (wanted > self._max_positions)
        stopped = self._criteria(rows, scores)
        late = self._is_late()
        for row in range(len(found)):
            if ended[row]:
                found[row] = "eos"
            elif full[row]:
                found[row] = "positions" if cut[row] else "length"
            elif stopped[row]:
                found[row] = "criterion"
            elif late:
                found[row] = "time"
        return found

    def _is_late(self) -> bool:
        limit = self._options.max_time
        return limit is not None and self._clock() - self._started > limit

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
