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


def test_perplexity_is_that_of_the_probabilities_of_the_next_tokens() -> None:
    drawn = np.random.default_rng(0)
    chances = drawn.dirichlet(np.ones(5), 5)
    # A model that sees the last token alone; logits may be shifted.
    logits = (np.log(chances) + drawn.normal(size=(5, 1))).astype(np.float32)
    held: set[int] = set()
    pages = SimpleNamespace(add=lambda: (held.add(1) or 1, 0), release=held.remove)
    model = SimpleNamespace(
        new_cache=lambda: SimpleNamespace(pages=pages),
        plan=lambda _, rows: Step(np.array(rows[0][1]), np.array([len(rows[0][1]) - 1])),
        run=lambda step, _: logits[step.ids[step.last]],
    )
    windows = drawn.integers(0, 5, (6, 8))
    perplexity, likeliest = quality(model, windows)
    seen = chances[windows[:, :-1], windows[:, 1:]]
    assert perplexity == pytest.approx(np.prod(seen) ** (-1 / seen.size), rel=1e-5)
    assert (likeliest == chances.argmax(-1)[windows[:, :-1]]).all()
    assert not held
