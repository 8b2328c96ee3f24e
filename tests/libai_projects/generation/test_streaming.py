"""Tokens handed out as they are chosen."""

from __future__ import annotations

import pytest

from libai_projects.generation import GenerationOptions, generate
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8]]
OPTIONS = GenerationOptions(max_length=30, eos_token_id=24)
SEVERAL = OPTIONS.replace(do_sample=True, num_return_sequences=4, seed=3)


@pytest.mark.parametrize("options", [OPTIONS, SEVERAL], ids=["greedy", "several returns"])
def test_every_token_in_order(model: NumpyGPT2, options: GenerationOptions) -> None:
    expected = generate(model, PROMPTS, options)
    received: dict[int, list[int]] = {}
    steps: list[list[int]] = [[]]

    def receive(number: int, token: int, _: object) -> None:
        received.setdefault(number, []).append(token)
        if steps[-1] and number <= steps[-1][-1]:
            steps.append([])
        steps[-1].append(number)

    assert generate(model, PROMPTS, options, on_token=receive) == expected
    assert received == dict(enumerate(one.new_tokens for one in expected.sequences))
    longest = max(len(one.new_tokens) for one in expected.sequences)
    assert steps == [
        [i for i, one in enumerate(expected.sequences) if len(one.new_tokens) > step]
        for step in range(longest)
    ]


def test_a_token_comes_before_the_next_is_computed(model: NumpyGPT2) -> None:
    computed: list[int] = []
    generate(model, PROMPTS, OPTIONS, on_token=lambda *_: computed.append(len(model.steps)))
    assert computed[:4] == [1, 1, 1, 2]


def test_an_error_of_the_receiver_ends_the_generation(model: NumpyGPT2) -> None:
    def leave(*_: object) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generate(model, PROMPTS, OPTIONS, on_token=leave)
    assert len(model.steps) == 1


def test_beam_search_tells_no_token(model: NumpyGPT2) -> None:
    told: list[int] = []
    options = OPTIONS.replace(num_beams=2)
    generate(model, PROMPTS, options, on_token=lambda number, *_: told.append(number))
    assert told == []
