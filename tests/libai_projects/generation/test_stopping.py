"""When sequences end: each by itself, at limits of length, positions and time, on a criterion."""

from __future__ import annotations

import itertools
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import pytest

from libai_projects.generation import Generation, GenerationOptions, generate
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8], [33, 44, 33, 44, 33]]


def reasons(result: Generation) -> list[str]:
    return [sequence.finish_reason for sequence in result.sequences]


def test_an_end_ends_its_own_sequence_only(model: NumpyGPT2) -> None:
    """Upstream ends all sequences at the first end of sequence of any."""
    options = GenerationOptions(max_length=30, eos_token_id=24)
    result = generate(model, PROMPTS, options)
    lengths = [len(sequence.new_tokens) for sequence in result.sequences]
    assert len(set(lengths)) > 1
    assert reasons(result) == ["eos"] * 4
    assert all(sequence.tokens[-1] == 24 for sequence in result.sequences)
    assert all(24 not in sequence.new_tokens[:-1] for sequence in result.sequences)


def test_finished_sequences_cost_nothing(model: NumpyGPT2) -> None:
    result = generate(model, PROMPTS, GenerationOptions(max_length=30, eos_token_id=24))
    lengths = np.array([len(sequence.new_tokens) for sequence in result.sequences])
    going_on = [int((lengths > step).sum()) for step in range(1, lengths.max())]
    assert model.steps == [(4, 7)] + [(rows, 1) for rows in going_on]


def test_beams_of_a_finished_prompt_cost_nothing(model: NumpyGPT2) -> None:
    options = GenerationOptions(
        max_length=40, eos_token_id=24, num_beams=3, early_stopping=True, min_length=8
    )
    generate(model, PROMPTS, options)
    rows = [rows for rows, _ in model.steps]
    assert rows[:2] == [4, 12]
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < 12
    assert all(count % 3 == 0 for count in rows[1:])


def test_max_length_counts_the_prompt_and_no_padding(model: NumpyGPT2) -> None:
    result = generate(model, PROMPTS, GenerationOptions(max_length=11, eos_token_id=None))
    assert [len(sequence.tokens) for sequence in result.sequences] == [11] * 4
    assert reasons(result) == ["length"] * 4


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_stops_at_the_last_position(model: NumpyGPT2, beams: int) -> None:
    options = GenerationOptions(max_new_tokens=1000, eos_token_id=None, num_beams=beams)
    result = generate(model, [[1] * 60, [1] * 63], options)
    assert [len(sequence.tokens) for sequence in result.sequences] == [64, 64]
    assert reasons(result) == ["positions"] * 2
    forced = generate(model, [[1] * 60], options.replace(forced_eos_token_id=9))
    assert forced.sequences[0].tokens[-1] == 9


def test_exactly_as_long_as_asked_for_is_no_cut(model: NumpyGPT2) -> None:
    result = generate(model, [[1] * 60], GenerationOptions(max_new_tokens=4, eos_token_id=None))
    assert reasons(result) == ["length"]


@pytest.mark.parametrize("beams", [1, 2])
def test_max_time(model: NumpyGPT2, beams: int) -> None:
    """The clock moves by one second whenever it is asked: at the start and after each token."""
    seconds = iter(range(1000))
    options = GenerationOptions(
        max_length=60,
        eos_token_id=None,
        max_time=4.5,
        num_beams=beams,
        early_stopping="never",
        length_penalty=9.0,
    )
    result = generate(model, PROMPTS, options, clock=lambda: float(next(seconds)))
    assert [len(sequence.new_tokens) for sequence in result.sequences] == [5] * 4
    assert reasons(result) == ["time"] * 4


def test_a_stopping_criterion_for_each_sequence(model: NumpyGPT2) -> None:
    def repeats(ids: np.ndarray, scores: np.ndarray | None) -> np.ndarray:
        assert scores is not None
        assert scores.shape == (len(ids), model.vocab_size)
        return ids[:, -1] == ids[:, -2]

    options = GenerationOptions(max_length=60, eos_token_id=None, stopping_criteria=(repeats,))
    plain = generate(model, PROMPTS, options.replace(stopping_criteria=None))
    result = generate(model, PROMPTS, options)
    for stopped, whole in zip(result.sequences, plain.sequences, strict=True):
        tokens, start = whole.tokens, whole.prompt_length
        first = next(i for i in range(start, 60) if tokens[i] == tokens[i - 1])
        assert stopped.tokens == tokens[: first + 1]
        assert stopped.finish_reason == "criterion"


def test_a_stopping_criterion_for_all(model: NumpyGPT2) -> None:
    for beams in (1, 2):
        options = GenerationOptions(
            max_length=60,
            eos_token_id=None,
            num_beams=beams,
            stopping_criteria=lambda ids, scores: ids.shape[1] >= 9,
        )
        result = generate(model, PROMPTS, options)
        assert [len(sequence.new_tokens) for sequence in result.sequences] == [2] * 4
        assert reasons(result) == ["criterion"] * 4


def test_a_criterion_of_a_wrong_shape(model: NumpyGPT2) -> None:
    options = GenerationOptions(stopping_criteria=lambda ids, scores: ids > 3)
    with pytest.raises(UserError, match="one for each of the 4 sequences"):
        generate(model, PROMPTS, options)


def test_processors_of_the_caller(model: NumpyGPT2) -> None:
    def only_multiples(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        assert ids.shape[0] == scores.shape[0]
        return np.where(np.arange(scores.shape[1]) % 5 == 0, scores, -np.inf)

    options = GenerationOptions(max_length=30, eos_token_id=None, logits_processor=only_multiples)
    for sequence in generate(model, PROMPTS, options).sequences:
        assert all(token % 5 == 0 for token in sequence.new_tokens)
    with pytest.raises(UserError, match="scores of the same shape"):
        generate(model, PROMPTS, options.replace(logits_processor=lambda ids, scores: scores[0]))


def test_words_can_be_forbidden_by_the_prefix_function(model: NumpyGPT2) -> None:
    """The word (15, 44) and the token 80, which greedy decoding writes otherwise."""

    def allowed(prompt: int, ids: np.ndarray) -> list[int]:
        assert ids[: len(PROMPTS[prompt])].tolist() == PROMPTS[prompt]
        bad = {80} | ({44} if ids[-1] == 15 else set())
        return [token for token in range(model.vocab_size) if token not in bad]

    options = GenerationOptions(max_length=30, eos_token_id=None)
    plain = generate(model, PROMPTS, options).sequences[0].new_tokens
    assert (15, 44) in itertools.pairwise(plain)
    assert 80 in plain
    for sequence in generate(
        model, PROMPTS, options.replace(prefix_allowed_tokens_fn=allowed)
    ).sequences:
        assert 80 not in sequence.new_tokens
        assert (15, 44) not in itertools.pairwise(sequence.new_tokens)


def test_a_prefix_function_that_allows_nothing(model: NumpyGPT2) -> None:
    options = GenerationOptions(prefix_allowed_tokens_fn=lambda prompt, ids: [])
    with pytest.raises(UserError, match="at least one token id from 0 to 96"):
        generate(model, PROMPTS, options)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits(model: NumpyGPT2, sampling: dict, bad: float) -> None:
    class Damaged(NumpyGPT2):
        def run(self, *arguments: Any) -> np.ndarray:
            logits = super().run(*arguments)
            logits[0, 5] = bad
            return logits

    damaged = Damaged(model._weights, 4)
    options = GenerationOptions(**sampling)
    with pytest.raises(UserError, match="weights are damaged"), np.errstate(all="ignore"):
        generate(damaged, PROMPTS, options)


def test_invalid_values_removed(model: NumpyGPT2) -> None:
    class Damaged(NumpyGPT2):
        def run(self, *arguments: Any) -> np.ndarray:
            logits = super().run(*arguments)
            logits[:, 5], logits[:, 6] = np.nan, np.inf
            return logits

    options = GenerationOptions(max_length=12, remove_invalid_values=True)
    result = generate(Damaged(model._weights, 4), PROMPTS, options)
    assert all(set(sequence.new_tokens) == {6} for sequence in result.sequences)
