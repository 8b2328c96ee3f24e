"""Narrowed distributions, against transformers' and against a plain full sort."""

from __future__ import annotations

import numpy as np
import pytest

from libai_projects.generation import GenerationOptions, processors
from libai_projects.generation.processors import ScoreChain, largest
from libai_projects.generation.sequences import Rows
from tests.libai_projects.generation import tiny_gpt2
from tests.libai_projects.generation.conftest import GOLDEN

# By the names of make_generation_golden.py.
WARPS: dict[str, processors.Warper] = {
    "top_k 1": lambda row: processors.top_k(row, 1),
    "top_k 40": lambda row: processors.top_k(row, 40),
    "top_k 5000": lambda row: processors.top_k(row, 5000),
    "top_p 0.1": lambda row: processors.top_p(row, 0.1),
    "top_p 0.9": lambda row: processors.top_p(row, 0.9),
    "top_p 0.999": lambda row: processors.top_p(row, 0.999),
    "top_p 0.1 keep 3": lambda row: processors.top_p(row, 0.1, keep=3),
    "min_p 0.3": lambda row: processors.min_p(row, 0.3),
    "min_p 0.01": lambda row: processors.min_p(row, 0.01),
    "min_p 1 keep 3": lambda row: processors.min_p(row, 1.0, keep=3),
    "typical 0.2": lambda row: processors.typical(row, 0.2),
    "typical 0.9": lambda row: processors.typical(row, 0.9),
    "typical 0.995": lambda row: processors.typical(row, 0.995),
    "typical 0.01 keep 2": lambda row: processors.typical(row, 0.01, keep=2),
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
    scores = tiny_gpt2.scores(4, 3001)
    warped = np.full_like(scores, -np.inf)
    for row, left in zip(scores, warped, strict=True):
        kept = WARPS[name](row)
        left[kept] = row[kept]
    assert_as_transformers(warped, name)


def test_same_temperature_as_transformers() -> None:
    warmed = processors.temperature(tiny_gpt2.scores(4, 3001), 0.7)
    assert_as_transformers(warmed, "temperature")


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
    (found,) = ScoreChain(options, vocab_size=40).candidates(scores)
    assert found.tokens.tolist() == [36, 37, 38, 39]
    assert found.scores.tolist() == [36, 37, 38, 39]


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


@pytest.mark.parametrize("mass", [0.05, 0.8, 0.999])
@pytest.mark.parametrize("scale", [1e-3, 1, 9])
def test_a_mass_of_a_large_vocabulary(scale: float, mass: float) -> None:
    """The nearest tokens and no more, of nearly equal and of nearly certain ones, by float64."""
    random = np.random.default_rng(3)
    row = (scale * random.standard_normal(50257)).astype(np.float32)
    row[random.integers(0, 50257, 100)] = -np.inf
    probability = softmax(row[None])[0]
    information = -np.log(np.maximum(probability, 1e-300))
    entropy = (probability * information).sum()
    for warp, distance in (
        (processors.top_p, information),
        (processors.typical, np.abs(information - entropy)),
    ):
        kept = np.isin(np.arange(50257), warp(row, mass))
        assert distance[kept].max() <= distance[~kept].min() + 1e-5
        furthest = probability[kept][distance[kept].argmax()]
        assert mass - 1e-5 <= probability[kept].sum() <= mass + furthest + 1e-5


def test_a_mass_of_equal_tokens_is_all_of_them() -> None:
    row = np.array([1, 1, -np.inf, 1, 0], dtype=np.float32)
    assert processors.top_p(row, 0.4).tolist() == [0, 1, 3]
