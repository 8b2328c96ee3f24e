"""Sampling: the right distribution, the same tokens from the same seed, wherever they are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from libai_projects.generation import GenerationOptions, generate
from libai_projects.generation.interface import ModelState
from libai_projects.generation.processors import (
    Candidates,
    ScoreChain,
    Stream,
    drawn,
    drawn_without_replacement,
    streams,
)
from libai_projects.generation.sequences import Rows
from tests.libai_projects.generation import tiny_gpt2
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8]]
SAMPLE = GenerationOptions(
    do_sample=True, max_new_tokens=15, eos_token_id=24, top_k=20, temperature=1.2
)


def new_tokens(model: NumpyGPT2, prompts: list[list[int]], options: GenerationOptions) -> list:
    return [sequence.new_tokens for sequence in generate(model, prompts, options).sequences]


def p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """Of a chi-square test; cells that expect fewer than 10 are put together."""
    expected = probability * counts.sum()
    large = expected >= 10
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0, "a token without any probability was drawn"
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def test_tokens_follow_the_distribution() -> None:
    """In three parts of a row, of which the last is not full."""
    size = 700
    scores = tiny_gpt2.scores(1, size)[0]
    scores[1::7] = -np.inf
    weights = np.exp(scores.astype(np.float64))
    count = 20_000
    tokens = drawn([Candidates(np.arange(size), scores)] * count, [Stream(4, 0)] * count)
    counts = np.bincount(tokens, minlength=size)
    assert p_value(counts, weights / weights.sum()) > 0.01


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 50}, {"top_p": 0.9, "temperature": 0.7}, {"typical_p": 0.9}]
)
def test_a_row_gets_the_same_tokens_beside_any_others(options: dict) -> None:
    chain = ScoreChain(GenerationOptions(do_sample=True, **{"top_k": 0, **options}), 50257)
    scores = np.random.default_rng(1).standard_normal((7, 50257)).astype(np.float32)
    rows = Rows(np.zeros((7, 1), dtype=np.int64), *([np.zeros(7, dtype=np.int64)] * 4))

    def tokens(those: list[int]) -> list[int]:
        narrowed = chain.candidates(chain.processed(rows, scores[those]))
        return drawn(narrowed, [Stream(5, number) for number in those]).tolist()

    together = tokens(list(range(7)))
    assert tokens([6, 2]) == [together[6], together[2]]
    assert [tokens([number])[0] for number in range(7)] == together


def test_different_seeds_and_numbers_give_independent_draws() -> None:
    numbers = [one.uniform() for one in streams(1000, 4000, 2)]
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    correlation = np.corrcoef(numbers[::2], numbers[1::2])[0, 1]
    assert abs(correlation) < 0.05


def test_the_whole_way_follows_the_warped_distribution(model: NumpyGPT2) -> None:
    """The first token of 4,000 prompts, temperature, top-k and top-p applied by hand."""
    options = GenerationOptions(
        do_sample=True, max_new_tokens=1, temperature=1.5, top_k=30, top_p=0.9, seed=7
    )
    tokens = [row[0] for row in new_tokens(model, [[1, 2, 3]] * 4000, options)]
    logits = ModelState(model, 1).read([[1, 2, 3]])[0]
    order = np.argsort(-logits)[:30]
    weights = np.exp(logits[order].astype(np.float64) / 1.5)
    weights /= weights.sum()
    weights[np.cumsum(weights) - weights >= 0.9] = 0
    probability = np.zeros(model.vocab_size)
    probability[order] = weights / weights.sum()
    assert p_value(np.bincount(tokens, minlength=model.vocab_size), probability) > 0.01


def test_a_configured_top_k_applies(model: NumpyGPT2) -> None:
    """Upstream ignores the sampling options of the configuration file."""
    options = GenerationOptions.from_config({"do_sample": True, "top_k": 1}, max_new_tokens=20)
    greedy = options.replace(do_sample=False)
    assert new_tokens(model, PROMPTS, options) == new_tokens(model, PROMPTS, greedy)
    wide = options.replace(top_k=0)
    assert new_tokens(model, PROMPTS, wide) != new_tokens(model, PROMPTS, greedy)


def test_a_batch_gives_what_single_prompts_give(model: NumpyGPT2) -> None:
    options = SAMPLE.replace(seed=40, num_return_sequences=3)
    batch = new_tokens(model, PROMPTS, options)
    alone = [
        tokens
        for number, prompt in enumerate(PROMPTS)
        for tokens in new_tokens(model, [prompt], options.replace(seed=40 + number))
    ]
    assert batch == alone
    assert len({tuple(tokens) for tokens in batch}) == 9


def test_one_seed_for_each_prompt(model: NumpyGPT2) -> None:
    batch = new_tokens(model, PROMPTS, SAMPLE.replace(seed=[9, 9, 2]))
    assert batch[0] == new_tokens(model, PROMPTS[:1], SAMPLE.replace(seed=9))[0]
    assert batch[1] == new_tokens(model, PROMPTS[1:2], SAMPLE.replace(seed=9))[0]
    assert batch[2] == new_tokens(model, PROMPTS[2:], SAMPLE.replace(seed=2))[0]


def test_the_first_of_several_returns_is_the_only_one_of_one(model: NumpyGPT2) -> None:
    several = new_tokens(model, PROMPTS, SAMPLE.replace(num_return_sequences=4))
    assert several[::4] == new_tokens(model, PROMPTS, SAMPLE)


def test_nothing_else_is_drawn_from_or_changed(model: NumpyGPT2) -> None:
    np.random.seed(1)
    first = new_tokens(model, PROMPTS, SAMPLE)
    after = np.random.random()
    np.random.seed(1)
    assert np.random.random() == after
    assert new_tokens(model, PROMPTS, SAMPLE) == first


def test_rounding_of_another_layout_changes_nothing(model: NumpyGPT2) -> None:
    """Tensor and pipeline parallelism change logits in the last digits."""

    class Rounded(NumpyGPT2):
        def run(self, *arguments: Any) -> np.ndarray:
            logits = super().run(*arguments)
            return logits + np.random.default_rng(0).uniform(-1e-6, 1e-6, logits.shape)

    other = Rounded(model._weights, tiny_gpt2.HEADS)
    options = SAMPLE.replace(num_return_sequences=5, top_p=0.95, typical_p=0.95)
    assert new_tokens(other, PROMPTS, options) == new_tokens(model, PROMPTS, options)


@pytest.mark.parametrize("options", [{"typical_p": 0.5}, {"repetition_penalty": 1.5}])
def test_processors_and_warpers_matter_in_sampling(model: NumpyGPT2, options: dict) -> None:
    changed = SAMPLE.replace(**options)
    assert new_tokens(model, PROMPTS, changed) != new_tokens(model, PROMPTS, SAMPLE)


def test_scores_of_each_step(model: NumpyGPT2) -> None:
    options = SAMPLE.replace(output_scores=True, renormalize_logits=True)
    for sequence in generate(model, PROMPTS, options).sequences:
        scores = sequence.step_scores
        assert scores is not None
        assert scores.shape == (len(sequence.new_tokens), model.vocab_size)
        np.testing.assert_allclose(np.exp(scores.astype(np.float64)).sum(axis=1), 1, rtol=1e-5)
        assert (np.isfinite(scores).sum(axis=1) == 20).all()
        assert np.isfinite(scores[np.arange(len(scores)), sequence.new_tokens]).all()


def test_draws_without_replacement_follow_their_distribution() -> None:
    """All ordered pairs out of four, against the product of the two steps."""
    probability = np.array([0.5, 0.3, 0.15, 0.05])
    scores = np.log(probability)
    stream = Stream(3, 0)
    counts = np.zeros((4, 4))
    for _ in range(8000):
        first, second = drawn_without_replacement(scores, 2, stream)
        counts[first, second] += 1
    expected = probability[:, None] * probability / (1 - probability[:, None])
    np.fill_diagonal(expected, 0)
    assert p_value(counts.ravel(), expected.ravel()) > 0.01


def test_draws_without_replacement_end_with_the_last_candidate() -> None:
    scores = np.array([-np.inf, 1.0, -np.inf, 2.0])
    assert sorted(drawn_without_replacement(scores, 4, Stream(0, 0))) == [1, 3]


def test_beam_sampling_is_seeded_and_varied(model: NumpyGPT2) -> None:
    options = SAMPLE.replace(num_beams=3, num_return_sequences=3)
    assert options.mode == "beam sampling"
    batch = new_tokens(model, PROMPTS, options)
    alone = [
        tokens
        for number, prompt in enumerate(PROMPTS)
        for tokens in new_tokens(model, [prompt], options.replace(seed=number))
    ]
    assert batch == alone
    assert batch != new_tokens(model, PROMPTS, options.replace(seed=77))
    assert batch != new_tokens(model, PROMPTS, options.replace(do_sample=False))


def test_beam_sampling_finds_what_beam_search_finds_where_nothing_else_is_likely(
    model: NumpyGPT2,
) -> None:
    """At a temperature near 0 drawing is ranking."""
    cold = SAMPLE.replace(num_beams=1, temperature=1e-3, top_k=0)
    assert new_tokens(model, PROMPTS, cold) == new_tokens(
        model, PROMPTS, cold.replace(do_sample=False)
    )
