"""Token by token what transformers generates: greedy decoding and beam search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from libai_projects.generation import GenerationOptions, generate
from tests.launch import REPOSITORY
from tests.libai_projects.generation.conftest import GOLDEN
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

NAMES = [case["name"] for case in json.loads((GOLDEN / "transformers.json").read_text())["cases"]]
TRAINED = REPOSITORY.parent / "shared" / "data" / "models" / "capp_gpt2_64d"


def options_of(case: dict[str, Any], golden: dict[str, Any]) -> GenerationOptions:
    given = dict(case["options"])
    if name := given.get("prefix_allowed_tokens_fn"):
        given["prefix_allowed_tokens_fn"] = lambda prompt, ids: golden["prefix_functions"][name]
    return GenerationOptions.from_config(given)


def until_end(tokens: list[int], start: int, options: GenerationOptions) -> list[int]:
    """A row of transformers' output up to the first end of sequence after the prompt."""
    for place in range(start, len(tokens)):
        if tokens[place] in options.end_ids:
            return tokens[: place + 1]
    return tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["one batch", "one by one"])
def test_same_tokens_as_transformers(
    name: str, one_by_one: bool, model: NumpyGPT2, golden: dict[str, Any]
) -> None:
    case = next(case for case in golden["cases"] if case["name"] == name)
    options = options_of(case, golden)
    prompts = case["prompts"]
    groups = [[prompt] for prompt in prompts] if one_by_one else [prompts]
    sequences = [
        sequence for group in groups for sequence in generate(model, group, options).sequences
    ]
    widest = max(map(len, prompts))
    for number, (sequence, expected) in enumerate(zip(sequences, case["sequences"], strict=True)):
        prompt = prompts[number // options.num_return_sequences]
        if case["batch"]:
            expected = expected[widest - len(prompt) :]
        assert sequence.tokens == until_end(expected, len(prompt), options), number
        assert sequence.prompt_length == len(prompt)
    if case["scores"]:
        ours = [sequence.score for sequence in sequences]
        # The golden scores are sums of up to 30 float32 logarithms, written with 6 digits.
        np.testing.assert_allclose(ours, case["scores"], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["greedy: all", "beams: several ends", "batch: beams"])
def test_same_tokens_without_a_cache(name: str, model: NumpyGPT2, golden: dict) -> None:
    case = next(case for case in golden["cases"] if case["name"] == name)
    options = options_of(case, golden)
    cached = generate(model, case["prompts"], options)
    assert generate(model, case["prompts"], options.replace(use_cache=False)) == cached


@pytest.mark.skipif(not TRAINED.exists(), reason="no shared data")
def test_greedy_continuations_of_a_trained_model() -> None:
    model = NumpyGPT2(load_file(TRAINED / "model.safetensors"), heads=4)
    reference = json.loads(Path(TRAINED / "reference.json").read_text())
    options = GenerationOptions(
        max_length=60, eos_token_id=reference["eos"], pad_token_id=reference["pad"]
    )
    result = generate(model, reference["input_ids"], options)
    assert [one.tokens for one in result.sequences] == reference["greedy_ids"]
    assert {one.finish_reason for one in result.sequences} == {"eos"}
