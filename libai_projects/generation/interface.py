"""What generation asks of a language model, and a model part of the way through some sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

# Opaque to generation but for its `pages`, a `models.pages.PagedCache`.
Cache = Any
# Likewise; a `models.pages.Step`.
Step = Any


class StepModel(Protocol):
    """A decoder that reads the next tokens of some sequences, each of its own length, in a step;
    every process of a run makes the same calls.

    `vocab_size` leaves out the rows that pad for tensor parallelism; `max_positions` is the longest
    sequence; `bytes_per_token` is the memory that the cache takes for a token, `page_bytes` for a
    page of them; `shares_prefixes` says whether sequences that begin alike have equal keys there.
    """

    vocab_size: int
    max_positions: int
    bytes_per_token: int
    page_bytes: int
    shares_prefixes: bool

    def free_memory(self) -> int | None:
        """Bytes that caches and logits may take where they are kept; None where nobody knows."""
        ...

    def new_cache(self, pages: int | None = None) -> Cache:
        """A cache without sequences, of at most so many pages."""
        ...

    def plan(self, cache: Cache, rows: Sequence[tuple[int, Sequence[int]]]) -> Step:
        """The step that reads these tokens, at least one, of sequences by their numbers in the
        cache."""
        ...

    def run(self, step: Step, cache: Cache) -> np.ndarray:
        """(sequences, vocab_size) float32 logits of what follows each, which may be written to."""
        ...


class ModelState:
    """A model part of the way through `count` sequences, which are empty at first; without
    `use_cache` it computes all positions again for each token."""

    def __init__(self, model: StepModel, count: int, use_cache: bool = True) -> None:
        self._model, self._use_cache = model, use_cache
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._begin()

    def _begin(self) -> None:
        self._cache = self._model.new_cache()
        self._numbers = [self._cache.pages.add()[0] for _ in self._tokens]

    def read(self, tokens: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Logits (R, V) float32 of what follows the next `tokens` of each sequence."""
        if not self._use_cache:
            self._tokens = [[*old, *new] for old, new in zip(self._tokens, tokens, strict=True)]
            self._begin()
            tokens = self._tokens
        step = self._model.plan(self._cache, list(zip(self._numbers, tokens, strict=True)))
        return np.asarray(self._model.run(step, self._cache), np.float32)

    def select(self, rows: Sequence[int] | np.ndarray) -> None:
        """Go on with sequence `rows[i]` as number i."""
        self._numbers = self._cache.pages.select(self._numbers, rows)
        self._tokens = [self._tokens[row] for row in rows]
