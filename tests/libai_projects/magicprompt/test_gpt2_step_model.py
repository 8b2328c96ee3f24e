"""Generation by steps against the float64 reference; processes: test_parallel_layouts.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from safetensors.numpy import load_file

from libai_projects.generation.interface import ModelState
from libai_projects.models.gpt2.model import GPT2StepModel
from tests.launch import REPOSITORY
from tests.libai_projects import reference_gpt2
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2
from tests.libai_projects.magicprompt.gpt2_models import logits, make
from tests.libai_projects.reference_gpt2 import Shape
from tests.tolerances import assert_close

SHAPE = Shape()
STATE = reference_gpt2.random_state(SHAPE)
IDS = np.random.default_rng(1).integers(0, SHAPE.vocabulary, (3, 16))
EXPECTED = reference_gpt2.forward(STATE, IDS, SHAPE.heads)


@pytest.fixture(scope="module")
def stepper() -> GPT2StepModel:
    return GPT2StepModel(make(STATE, SHAPE, vocab_size=128, vocab_size_real=SHAPE.vocabulary))


def steps(model: Any, ends: tuple[int, ...], use_cache: bool = True) -> np.ndarray:
    """The logits at the end of each step, (steps, 3, vocabulary)."""
    state, begin, found = ModelState(model, 3, use_cache), 0, []
    for end in ends:
        found.append(state.read(IDS[:, begin:end]))
        begin = end
    return np.stack(found)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("ends", [(7, *range(8, 17)), (1, 2, 9, 16), (16,)], ids=str)
def test_steps_are_the_references(
    stepper: GPT2StepModel, ends: tuple[int, ...], use_cache: bool
) -> None:
    found = steps(stepper, ends, use_cache)
    assert found.dtype == np.float32
    expected = EXPECTED[:, np.array(ends) - 1].swapaxes(0, 1)
    assert_close(found, expected, reduced=SHAPE.width)


class QuantisedGPT2(NumpyGPT2):
    """Weights of 8 bits with a scale for each output, activations for each 64 inputs of a row."""

    def _product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        def whole(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            largest = abs(values).max(-1, keepdims=True)
            return np.rint(values * (127 / largest)), largest / 127

        (rows, by_group), (columns, by_row) = whole(x.reshape(*x.shape[:-1], -1, 64)), whole(weight)
        product = np.einsum("...gi,ogi->...og", rows, columns.reshape(len(weight), -1, 64))
        return (product * by_group[..., 0][..., None, :]).sum(-1) * by_row[:, 0]


def test_int8_is_float64_of_the_same_whole_numbers() -> None:
    dtypes = {"weights_dtype": "int8", "cache_dtype": "float32"}
    model, ends = GPT2StepModel(make(STATE, SHAPE), **dtypes), (7, 8, 16)
    expected = steps(QuantisedGPT2(STATE, SHAPE.heads), ends)
    # Where float32 rounds to the other side, a number moves by a 127th.
    np.testing.assert_allclose(steps(model, ends), expected, rtol=0, atol=0.01 * EXPECTED.std())


def test_a_step_is_the_training_model(stepper: GPT2StepModel) -> None:
    found = ModelState(stepper, 3).read(IDS)
    assert_close(found, logits(make(STATE, SHAPE), IDS)[:, -1], reduced=SHAPE.width)


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_of_several_lengths_are_dropped_repeated_and_reordered(
    stepper: GPT2StepModel, use_cache: bool
) -> None:
    state, ends = ModelState(stepper, 3, use_cache), np.array([9, 4, 7])
    found = state.read([row[:end] for row, end in zip(IDS, ends, strict=True)])
    assert_close(found, EXPECTED[range(3), ends - 1], reduced=SHAPE.width)
    rows = np.array([2, 0, 1, 0, 2])
    state.select(rows)
    for more in (0, 1):
        found = state.read(IDS[rows, ends[rows] + more][:, None])
        assert_close(found, EXPECTED[rows, ends[rows] + more], reduced=SHAPE.width)
    state.select([3])
    found = state.read(IDS[:1, 11:16])
    assert_close(found, EXPECTED[:1, 15], reduced=SHAPE.width)


def test_the_padding_of_the_vocabulary_is_not_in_the_logits(stepper: GPT2StepModel) -> None:
    assert (stepper.vocab_size, stepper.max_positions) == (SHAPE.vocabulary, SHAPE.positions)
    found = ModelState(stepper, 3).read(IDS)
    assert found.shape == (3, SHAPE.vocabulary)


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
def test_a_trained_model_continues_as_transformers_does(weights_dtype: str) -> None:
    folder = REPOSITORY.parent / "shared" / "data" / "models" / "capp_gpt2_64d"
    if not folder.is_dir():
        pytest.skip("no shared data")
    config = json.loads((folder / "config.json").read_text())
    golden = json.loads((folder / "reference.json").read_text())
    shape = Shape(config["n_layer"], config["n_embd"], config["n_head"], 53, config["n_positions"])
    state = load_file(Path(folder) / "model.safetensors")
    model = GPT2StepModel(make(state, shape), weights_dtype=weights_dtype)
    for prompt, expected in zip(golden["input_ids"], golden["greedy_ids"], strict=True):
        ids, state, begin = list(prompt), ModelState(model, 1), 0
        while len(ids) < len(expected):
            found, begin = state.read([ids[begin:]]), len(ids)
            ids.append(int(found[0].argmax()))
        assert ids == expected


def test_a_dtype_that_does_not_exist_is_an_error() -> None:
    for wrong in ({"weights_dtype": "float16"}, {"cache_dtype": "int8"}):
        with pytest.raises(UserError, match=r"float16.*float32, bfloat16, int8|int8.*, bfloat16$"):
            GPT2StepModel(make(STATE, SHAPE), **wrong)


def test_a_page_is_full_and_a_copy_is_written_to() -> None:
    """Across the end of a page, in chunks, and after copies of sequences in the middle of one."""
    shape = Shape(positions=160)
    state = reference_gpt2.random_state(shape)
    ids = np.random.default_rng(2).integers(0, shape.vocabulary, (2, 150))
    expected = reference_gpt2.forward(state, ids, shape.heads)
    model = GPT2StepModel(make(state, shape))
    cache = model.new_cache(pages=6)
    first, second = (cache.pages.add()[0] for _ in range(2))
    ends = (50, 100, 129)
    for begin, end in zip((0, *ends), ends, strict=False):
        rows = [(first, ids[0, begin:end]), (second, ids[1, begin : begin + 1])]
        step = model.plan(cache, rows if begin == 0 else rows[:1])
        found = model.run(step, cache)
        assert_close(found[0], expected[0, end - 1], reduced=shape.width)
    copy = cache.pages.fork(first)
    # Both go on, and the sequence of one token, each with tokens of its own.
    rows = [(first, ids[0, 129:140]), (copy, ids[0, 129:131]), (second, ids[1, 1:100])]
    found = model.run(model.plan(cache, rows), cache)
    wanted = np.stack([expected[0, 139], expected[0, 130], expected[1, 99]])
    assert_close(found, wanted, reduced=shape.width)
    with pytest.raises(UserError, match="0 pages left and the next tokens need 1"):
        model.plan(cache, [(first, ids[0, 140:141]), (second, ids[1, 100:150])])
    assert cache.pages.length(first) == 140
    cache.pages.release(copy)
    found = model.run(model.plan(cache, [(second, ids[1, 100:150])]), cache)
    assert_close(found[0], expected[1, 149], reduced=shape.width)
