"""Narrowed distributions, against transformers' and against a plain full sort."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from libai_projects.generation import GenerationOptions, processors
from libai_projects.generation.processors import ScoreChain, largest
from libai_projects.generation.sequences import Rows
from tests.libai_projects.generation import tiny_gpt2
from tests.libai_projects.generation.conftest import GOLDEN

Warp = Callable[[np.ndarray], np.ndarray]
# By the names of make_generation_golden.py.
WARPS: dict[str, Warp] = {
    "temperature": lambda scores: processors.temperature(scores, 0.7),
    "top_k 1": lambda scores: processors.top_k(scores, 1),
    "top_k 40": lambda scores: processors.top_k(scores, 40),
    "top_k 5000": lambda scores: processors.top_k(scores, 5000),
    "top_p 0.1": lambda scores: processors.top_p(scores, 0.1),
    "top_p 0.9": lambda scores: processors.top_p(scores, 0.9),
    "top_p 0.999": lambda scores: processors.top_p(scores, 0.999),
    "top_p 0.1 keep 3": lambda scores: processors.top_p(scores, 0.1, keep=3),
    "min_p 0.3": lambda scores: processors.min_p(scores, 0.3),
    "min_p 0.01": lambda scores: processors.min_p(scores, 0.01),
    "min_p 1 keep 3": lambda scores: processors.min_p(scores, 1.0, keep=3),
    "typical 0.2": lambda scores: processors.typical(scores, 0.2),
    "typical 0.9": lambda scores: processors.typical(scores, 0.9),
    "typical 0.995": lambda scores: processors.typical(scores, 0.995),
    "typical 0.01 keep 2": lambda scores: processors.typical(scores, 0.01, keep=2),
}


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def assert_as_transformers(warped: np.ndarray, name: str) -> None:
    with np.load(GOLDEN / "warped.npz") as golden:
        kept, probability = golden[f"{name}/kept"], golden[f"{name}/probability"]
    row, token = np.nonzero(np.isfinite(warped))
    np.testing.assert_array_equal(np.stack([row, token]), kept)
    # transformers normalizes 3,001 float32 numbers.
    np.testing.assert_allclose(softmax(warped)[row, token], probability, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("name", WARPS)
def test_same_distribution_as_transformers(name: str) -> None:
    assert_as_transformers(WARPS[name](tiny_gpt2.scores(4, 3001)), name)


def test_warpers_are_applied_in_the_order_of_transformers() -> None:
    options = GenerationOptions(
        do_sample=True, temperature=1.3, top_k=200, top_p=0.95, typical_p=0.8
    )
    chain = ScoreChain(options, vocab_size=3001)
    rows = Rows(np.zeros((4, 1), dtype=np.int64), *([np.zeros(4, dtype=np.int64)] * 4))
    assert_as_transformers(chain(rows, tiny_gpt2.scores(4, 3001)), "all")


def test_beams_keep_one_token_more_than_there_are_ends() -> None:
    options = GenerationOptions(
        do_sample=True, num_beams=2, top_k=1, top_p=0.01, eos_token_id=[1, 2, 3]
    )
    scores = np.arange(40.0, dtype=np.float32)[None]
    for warp in processors.build_warpers(options):
        scores = warp(scores)
    assert np.flatnonzero(np.isfinite(scores[0])).tolist() == [36, 37, 38, 39]


@pytest.mark.parametrize("count", [1, 3, 50, 256, 4096, 50256, 50257, 60000])
def test_largest_is_what_a_full_sort_finds(count: int) -> None:
    random = np.random.default_rng(count)
    values = random.standard_normal(50257).astype(np.float32)
    values[random.integers(0, 50257, 100)] = -np.inf
    expected = np.sort(np.argsort(values)[::-1][:count])
    unequal = np.unique(values[expected]).size == expected.size
    found = largest(values, count)
    if unequal:
        np.testing.assert_array_equal(found, expected)
    assert set(expected) <= set(found)
    assert (values[found] >= values[expected].min()).all()


def test_equal_values_stay_together() -> None:
    assert largest(np.array([2.0, 1.0, 2.0, 3.0, 2.0]), 2).tolist() == [0, 2, 3, 4]


def test_a_nucleus_of_most_of_a_large_vocabulary() -> None:
    """More tokens than are looked at first: compared with a full sort."""
    scores = np.random.default_rng(3).standard_normal((2, 50257)).astype(np.float32)
    probability = softmax(scores)
    for row, kept in enumerate(np.isfinite(processors.top_p(scores, 0.8))):
        order = np.argsort(-probability[row])
        count = int(np.searchsorted(np.cumsum(probability[row][order]), 0.8)) + 1
        assert count > 10_000
        np.testing.assert_array_equal(np.flatnonzero(kept), np.sort(order[:count]))
