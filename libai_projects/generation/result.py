"""What generation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

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
