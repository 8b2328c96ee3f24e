"""The sequences that are being generated, as the score processors see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
