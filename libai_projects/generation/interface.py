"""What generation asks of a language model, and a model part of the way through a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from libai_projects.generation.sequences import Rows

# Opaque to generation: only the model that made it looks inside.
Cache = Any


class StepModel(Protocol):
    """A decoder that reads tokens step by step; every process of a run makes the same calls.

    `vocab_size` leaves out the rows that pad for tensor parallelism; `max_positions` is the longest
    sequence; `bytes_per_token` is the memory that the cache takes for a token.
    """

    vocab_size: int
    max_positions: int
    bytes_per_token: int

    def free_memory(self) -> int | None:
        """Bytes that caches and logits may take where they are kept; None where nobody knows."""
        ...

    def start(self, batch_size: int, use_cache: bool = True) -> Cache:
        """A cache of `batch_size` empty sequences; without `use_cache` it keeps token ids only, and
        each step computes all positions again."""
        ...

    def step(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Cache
    ) -> np.ndarray:
        """Read the next tokens of each sequence; (B, vocab_size) float32 logits at the last one.

        Args:
            ids: (B, T) int64, the tokens since the last call.
            positions: (B, T) int64, the position of each; 0 where it is padding.
            mask: (B, length so far, these T included) bool, False for left padding; None without
                any. With padding, the length may exceed `max_positions`; positions do not.
            cache: what `start` returned; extended in place.
        """
        ...

    def select(self, cache: Cache, rows: np.ndarray) -> None:
        """Make row `rows[i]` (int64) of the cache its row i, in place: drops, reorders, repeats."""
        ...


class PagedModel(StepModel, Protocol):
    """One that reads tokens of many sequences at once, each of its own length; for what these are
    see `models.step_model` and `models.pages`, of which a cache has its `PagedCache` as `pages`."""

    page_bytes: int
    shares_prefixes: bool

    def new_cache(self, pages: int | None = None) -> Cache: ...

    def plan(self, cache: Cache, rows: Sequence[tuple[int, Sequence[int]]]) -> Any: ...

    def run(self, step: Any, cache: Cache) -> np.ndarray: ...


class ModelState:
    """A model part of the way through a batch of sequences."""

    def __init__(self, model: StepModel, prompts: Rows, use_cache: bool) -> None:
        self._model = model
        self._prompts = prompts.ids
        self._padding = prompts.padding
        self._width = prompts.ids.shape[1]
        self._cache = model.start(len(prompts.ids), use_cache)

    def read_prompts(self) -> np.ndarray:
        """Logits (B, V) float32 of what follows the prompts."""
        # Counted from a prompt's own first token, 0 at padding.
        positions = np.maximum(np.arange(self._width) - self._padding[:, None], 0)
        return self._step(self._prompts, positions)

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
        mask = np.arange(self._width) >= self._padding[:, None] if self._padding.any() else None
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
