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

    Attributes:
        ids: (R, T) int64, padding on the left.
        padding: (R,) int64, columns of padding of each.
        prompt_lengths: (R,) int64, tokens of its prompt.
        limits: (R,) int64, longest length it may have.
        prompts: (R,) int64, the number of its prompt.
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
        """Sequence `rows[i]` as number i; sequences may be dropped and repeated."""
        return Rows(
            self.ids[rows],
            self.padding[rows],
            self.prompt_lengths[rows],
            self.limits[rows],
            self.prompts[rows],
        )

    def append(self, tokens: np.ndarray) -> Rows:
        """Each sequence with its next token, `tokens` (R,) int64."""
        ids = np.concatenate([self.ids, tokens[:, None]], axis=1)
        return Rows(ids, self.padding, self.prompt_lengths, self.limits, self.prompts)


# Why a sequence ended: its own end of sequence; the length asked for; the model's last position;
# max_time; a stopping criterion of the caller.
FinishReason = Literal["eos", "length", "positions", "time", "criterion"]


@dataclass(frozen=True)
class GeneratedSequence:
    """One sequence.

    Attributes:
        prompt: the number of its prompt.
        tokens: prompt and new tokens; the end of sequence included, padding not.
        prompt_length: tokens of the prompt at its beginning.
        finish_reason: why it ended.
        score: beam search only: sum of the log probabilities / new tokens ** length_penalty.
        step_scores: (new tokens, V) float32 with `output_scores`, else None: the scores that each
            token was chosen from, after all processors. Greedy and sampling only.
    """

    prompt: int
    tokens: list[int]
    prompt_length: int
    finish_reason: FinishReason
    score: float | None = None
    step_scores: np.ndarray | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class Generation:
    """All sequences: those of the first prompt, best one first in beam search, then the next's."""

    sequences: list[GeneratedSequence]

    def as_array(self, pad_token_id: int) -> np.ndarray:
        """(sequences, T) int64 as transformers returns them: prompts padded on the left to the same
        length, results on the right."""
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
    """The rules of one call of `generate`; its time starts when this is made.

    Args:
        options: the rules.
        max_positions: of the model.
        clock: seconds. In a distributed run all processes must be told the same time, or some stop
            while others wait for them: pass one that asks process 0.
    """

    def __init__(self, options: GenerationOptions, max_positions: int, clock: Clock) -> None:
        self._options = options
        self._max_positions = max_positions
        self._clock = clock
        self._started = clock() if options.max_time is not None else 0.0

    def reasons(self, rows: Rows, scores: np.ndarray | None) -> list[FinishReason | None]:
        """Why each of `rows`, whose last tokens are new, is finished; None where it is not.

        Args:
            rows: R sequences.
            scores: (R, V) float32 that the new tokens were chosen from; None in beam search.

        Raises:
            UserError: a stopping criterion returned something of another shape.
        """
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
