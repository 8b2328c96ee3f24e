"""Tokens handed out as they are chosen."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest

from libai_projects.generation import Generation, GenerationOptions, generate, stream
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8]]
OPTIONS = GenerationOptions(max_length=30, eos_token_id=24)
SEVERAL = OPTIONS.replace(do_sample=True, num_return_sequences=4, seed=3)


@pytest.mark.parametrize("options", [OPTIONS, SEVERAL], ids=["greedy", "several returns"])
def test_every_token_in_order(model: NumpyGPT2, options: GenerationOptions) -> None:
    expected = generate(model, PROMPTS, options)
    received: dict[int, list[int]] = {}
    steps: list[list[int]] = [[]]
    tokens = stream(model, PROMPTS, options)
    while True:
        try:
            number, token = next(tokens)
        except StopIteration as end:
            result = end.value
            break
        received.setdefault(number, []).append(token)
        if steps[-1] and number <= steps[-1][-1]:
            steps.append([])
        steps[-1].append(number)
    assert isinstance(result, Generation)
    assert result == expected
    assert received == dict(enumerate(one.new_tokens for one in expected.sequences))
    longest = max(len(one.new_tokens) for one in expected.sequences)
    assert steps == [
        [i for i, one in enumerate(expected.sequences) if len(one.new_tokens) > step]
        for step in range(longest)
    ]


def test_a_token_comes_before_the_next_is_computed(model: NumpyGPT2) -> None:
    tokens = stream(model, PROMPTS, OPTIONS)
    assert model.steps == []
    for _ in range(3):
        next(tokens)
    assert len(model.steps) == 1
    next(tokens)
    assert len(model.steps) == 2


def test_closing_ends_the_generation(model: NumpyGPT2) -> None:
    tokens = stream(model, PROMPTS, OPTIONS)
    next(tokens)
    tokens.close()
    assert list(tokens) == []
    assert len(model.steps) == 1


def test_wrong_arguments_are_refused_at_the_call(model: NumpyGPT2) -> None:
    with pytest.raises(UserError, match="raise max_length"):
        stream(model, [[1] * 40], OPTIONS)
    with pytest.raises(UserError, match="set num_beams to 1"):
        stream(model, PROMPTS, OPTIONS.replace(num_beams=2))
