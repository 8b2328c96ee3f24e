"""benchmarks.quantised: perplexity and likeliest tokens of a model, read window by window."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.quantised import quality


@dataclass(frozen=True)
class Step:
    ids: np.ndarray
    last: np.ndarray


class Bigrams:
    """Logits of the next token by the last one alone."""

    def __init__(self, logits: np.ndarray) -> None:
        self._logits, self.held = logits, 0

    def new_cache(self) -> SimpleNamespace:
        return SimpleNamespace(pages=SimpleNamespace(add=self._add, release=self._release))

    def plan(self, cache: object, rows: list[tuple[int, list[int]]]) -> Step:
        ((_, ids),) = rows
        return Step(np.array(ids), np.array([len(ids) - 1]))

    def run(self, step: Step, cache: object) -> np.ndarray:
        return self._logits[step.ids[step.last]]

    def _add(self) -> tuple[int, int]:
        self.held += 1
        return self.held, 0

    def _release(self, number: int) -> None:
        self.held -= 1


def test_perplexity_is_that_of_the_probabilities_of_the_next_tokens() -> None:
    drawn = np.random.default_rng(0)
    chances = drawn.dirichlet(np.ones(5), 5)
    # The same for each shift of the logits of a place.
    model = Bigrams((np.log(chances) + drawn.normal(size=(5, 1))).astype(np.float32))
    windows = drawn.integers(0, 5, (6, 8))
    perplexity, likeliest = quality(model, windows)
    seen = chances[windows[:, :-1], windows[:, 1:]]
    assert perplexity == pytest.approx(np.prod(seen) ** (-1 / seen.size), rel=1e-5)
    assert (likeliest == chances.argmax(-1)[windows[:, :-1]]).all()
    assert model.held == 0
