"""The model, its cache, and what the next step must tell it: positions and the padding mask."""

from __future__ import annotations

import numpy as np

from libai_projects.generation.interface import StepModel
from libai_projects.generation.prompts import PaddedPrompts, visible


class ModelState:
    """A model part of the way through a batch of sequences.

    Args:
        model: what reads the tokens.
        prompts: the batch of B prompts.
        use_cache: passed to `StepModel.start`.
    """

    def __init__(self, model: StepModel, prompts: PaddedPrompts, use_cache: bool) -> None:
        self._model = model
        self._prompts = prompts
        self._padding = prompts.padding
        self._width = prompts.ids.shape[1]
        self._cache = model.start(len(prompts.ids), use_cache)

    def read_prompts(self) -> np.ndarray:
        """Logits (B, V) float32 of what follows the prompts."""
        return self._step(self._prompts.ids, self._prompts.positions)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (R, V) float32 of what follows `tokens` (R,) int64, the next of each sequence."""
        positions = (self._width - self._padding)[:, None]
        self._width += 1
        return self._step(tokens[:, None], positions)

    def select(self, rows: np.ndarray) -> None:
        """Go on with sequence `rows[i]` as number i."""
        if rows.size == self._padding.size and np.array_equal(rows, np.arange(rows.size)):
            return
        self._padding = self._padding[rows]
        self._model.select(self._cache, rows)

    def _step(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        mask = visible(self._padding, self._width)
        logits = np.asarray(self._model.step(ids, positions, mask, self._cache))
        vocab_size = self._model.vocab_size
        if logits.ndim != 2 or len(logits) != len(ids) or logits.shape[1] < vocab_size:
            raise RuntimeError(
                f"the model returned logits of the shape {logits.shape}, expected "
                f"{(len(ids), vocab_size)}"
            )
        # A copy, since processors write into it. Columns beyond the real vocabulary are padding
        # for tensor parallelism and never a token.
        return np.array(logits[:, :vocab_size], dtype=np.float32, order="C")
