"""Whatever options say, `generate` gives tokens or one sentence: no other error, and no NaN."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from oneflow_accel import machine
from oneflow_accel.errors import UserError

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libai_projects.generation import GenerationOptions, beam, generate, processors
from libai_projects.generation.sequences import Rows
from tests.libai_projects import any_request
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

DEFAULTS = {"eos_token_id": 24, "bos_token_id": 3}
BEAMS = {"num_beams": 2, "max_new_tokens": 4}
SAMPLE = {"do_sample": True, "max_new_tokens": 4}


def outcome(model: NumpyGPT2, prompts: Sequence[list[int]], options: dict[str, Any]) -> list | str:
    """The new tokens, or the sentence; anything else is raised, NumPy's warnings too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            chosen = GenerationOptions.from_config(DEFAULTS, **options)
            return [each.new_tokens for each in generate(model, prompts, chosen).sequences]
        except UserError as error:
            return str(error)


@settings(any_request.BOUNDED, max_examples=400)
@given(
    st.lists(st.lists(st.integers(0, 95), max_size=6), min_size=1, max_size=2),
    any_request.options(),
)
@example([[1, 2]], {"do_sample": True, "temperature": 1e-300})
@example([[1, 2]], {"do_sample": True, "temperature": 1.2e-38})
@example([[1, 2]], {"do_sample": True, "temperature": 1.7e308, "min_length": 9})
@example([[1, 2]], {"num_beams": 2, "length_penalty": -1e308})
@example([[1, 2]], {"num_beams": 2, "length_penalty": 1e308})
@example([[1, 2]], {"num_beams": 2, "length_penalty": 100, "max_length": 40})
@example([[1, 2]], {"exponential_decay_length_penalty": [0, 1e308], "num_beams": 2})
@example([[1, 2]], {"temperature": 10**400})
@example([[1, 2]], {"eos_token_id": 2**63})
@example([[]], {"bos_token_id": 2**63})
@example([[1, 2]], {"num_beams": 2**31 - 1})
@example([[1, 2]], {"do_sample": True, "num_return_sequences": 2**31 - 1})
@example([[1, 2]], {"self": 1})
@example([[1, 2]], {"config": 1})
@example([[1, 2]], {"cls": 1})
def test_tokens_or_a_sentence(
    model: NumpyGPT2, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    found = outcome(model, prompts, options)
    if isinstance(found, str):
        assert found
        assert len(found) < 1000
        assert "\n" not in found
        return
    assert len(found) == len(prompts) * options.get("num_return_sequences", 1)
    for tokens in found:
        assert tokens
        assert 0 <= min(tokens) <= max(tokens) < model.vocab_size


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-10])
def test_a_temperature_near_0_takes_the_likeliest(model: NumpyGPT2, temperature: float) -> None:
    cold = outcome(model, [[1, 2, 3]], {**SAMPLE, "temperature": temperature})
    assert cold == outcome(model, [[1, 2, 3]], {"max_new_tokens": 4})


def test_a_temperature_beyond_float32_makes_all_equal_that_may_come() -> None:
    scores = np.array([[3.0, -np.inf, 1.0, -3e38]], dtype=np.float32)
    for value in (3.4e38, 1e300):
        np.testing.assert_allclose(
            processors.temperature(scores, value), [[0, -np.inf, 0, -0.9]], atol=0.1
        )
    scores[0, 0] = 40
    cold = processors.temperature(scores, 1.2e-38)[0]
    np.testing.assert_array_equal(cold, [0] + [-np.inf] * 3)


@pytest.mark.parametrize("factor", [1.5, 1e10, 1e308])
def test_the_end_wins_where_its_gain_overflows(factor: float) -> None:
    scores = np.array([[-2.0, 0.0, 5.0, -np.inf]], dtype=np.float32)
    counts = [np.array([number]) for number in (0, 1, 100, 0)]
    rows = Rows(np.zeros((1, 40), dtype=np.int64), *counts)
    ends = np.array([0, 1, 3])
    found = processors.length_decay(rows, scores.copy(), 3, factor, ends)
    expected = min(-2 + 2 * (float(factor) ** 36 - 1), 3.4028235e38) if factor < 2 else 3.4028235e38
    np.testing.assert_allclose(found, [[expected, 0, 5, -np.inf]], rtol=1e-6)


def test_a_length_penalty_ranks_at_its_bounds() -> None:
    for penalty in (-100.0, -1.5, 0.0, 1.0, 100.0):
        found = [
            beam._penalized(-score, length, penalty) for score in (0.5, 3.0) for length in (2, 900)
        ]
        logs = [
            -(np.log(score) - penalty * np.log(length))
            for score in (0.5, 3.0)
            for length in (2, 900)
        ]
        assert np.isfinite(found).all()
        np.testing.assert_allclose(-np.log(-np.array(found)), logs, rtol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "options",
    [{}, SAMPLE, {**SAMPLE, "top_k": 0}, {**SAMPLE, "top_p": 0.5}, BEAMS, {**BEAMS, **SAMPLE}],
)
def test_scores_that_leave_nothing_are_a_sentence(
    model: NumpyGPT2, monkeypatch: pytest.MonkeyPatch, bad: float, options: dict[str, Any]
) -> None:
    def run(step: Any, _cache: Any) -> np.ndarray:
        return np.full((len(step.last), model.vocab_size), bad, np.float32)

    monkeypatch.setattr(model, "run", run)
    with np.errstate(invalid="ignore"):
        found = GenerationOptions.from_config(DEFAULTS, **options)
        with pytest.raises(UserError, match="no token to choose"):
            generate(model, [[1, 2]], found)


def test_more_than_the_memory_holds_is_refused_before_it_is_asked_for(
    model: NumpyGPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2**20
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    options = {"do_sample": True, "num_return_sequences": 500}
    assert "ask for fewer" in outcome(model, [[1, 2]], options)
    assert "ask for fewer" in outcome(model, [[1, 2]], {"num_beams": 500})
    free = 2**40
    assert len(outcome(model, [[1, 2]], options)) == 500
