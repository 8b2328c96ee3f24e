"""Generation by steps against the float64 reference; processes: test_parallel_layouts.py."""

from __future__ import annotations

import json
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from safetensors.numpy import load_file

from libai_projects.models.gpt2.model import GPT2StepModel
from tests.launch import REPOSITORY
from tests.libai_projects import reference_gpt2
from tests.libai_projects.magicprompt.gpt2_models import logits, make
from tests.libai_projects.reference_gpt2 import Shape
from tests.tolerances import assert_close

SHAPE = Shape()
STATE = reference_gpt2.random_state(SHAPE)
IDS = np.random.default_rng(1).integers(0, SHAPE.vocabulary, (3, 16))
POSITIONS = np.broadcast_to(np.arange(16), IDS.shape)
EXPECTED = reference_gpt2.forward(STATE, IDS, SHAPE.heads)


@pytest.fixture(scope="module")
def stepper() -> GPT2StepModel:
    return GPT2StepModel(make(STATE, SHAPE, vocab_size=128, vocab_size_real=SHAPE.vocabulary))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ends", [(7, *range(8, 17)), (1, 2, 9, 16), (16,)], ids=str)
def test_steps_are_the_references(ends: tuple[int, ...], fused: bool, use_cache: bool) -> None:
    model = GPT2StepModel(make(STATE, SHAPE, scale_mask_softmax_fusion=fused))
    cache, begin = model.start(3, use_cache), 0
    for end in ends:
        found = model.step(IDS[:, begin:end], POSITIONS[:, begin:end], None, cache)
        assert found.dtype == np.float32
        assert_close(found, EXPECTED[:, end - 1], reduced=SHAPE.width)
        begin = end


def test_a_step_is_the_training_model(stepper: GPT2StepModel) -> None:
    found = stepper.step(IDS, POSITIONS, None, stepper.start(3))
    assert_close(found, logits(make(STATE, SHAPE), IDS)[:, -1], reduced=SHAPE.width)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_padded_batch_is_its_single_prompts(fused: bool, use_cache: bool) -> None:
    model = GPT2StepModel(make(STATE, SHAPE, scale_mask_softmax_fusion=fused))
    lengths = (10, 4, 7)
    mask = np.arange(16) >= 10 - np.array(lengths)[:, None]
    # Nothing that stands for padding matters, not even a token that does not exist.
    ids = np.where(mask, IDS, 10**6)
    positions = np.where(mask, np.cumsum(mask, 1) - 1, -1)
    batch = model.start(3, use_cache)
    singles = [model.start(1) for _ in lengths]
    begin = 0
    for end in (10, 11, 12, 14, 16):
        found = model.step(ids[:, begin:end], positions[:, begin:end], mask[:, :end], batch)
        for row, cache in enumerate(singles):
            seen = mask[row, begin:end]
            part = ids[row : row + 1, begin:end][:, seen]
            place = positions[row : row + 1, begin:end][:, seen]
            single = model.step(part, place, None, cache)
            assert_close(found[row : row + 1], single, reduced=SHAPE.width)
        begin = end


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_are_dropped_repeated_and_reordered(stepper: GPT2StepModel, use_cache: bool) -> None:
    cache = stepper.start(3, use_cache)
    stepper.step(IDS[:, :9], POSITIONS[:, :9], None, cache)
    rows = np.array([2, 0, 0, 2])
    stepper.select(cache, rows)
    found = stepper.step(IDS[rows, 9:10], POSITIONS[rows, 9:10], None, cache)
    assert_close(found, EXPECTED[rows, 9], reduced=SHAPE.width)
    stepper.select(cache, np.array([1]))
    found = stepper.step(IDS[:1, 10:11], POSITIONS[:1, 10:11], None, cache)
    assert_close(found, EXPECTED[:1, 10], reduced=SHAPE.width)


def test_the_padding_of_the_vocabulary_is_not_in_the_logits(stepper: GPT2StepModel) -> None:
    assert (stepper.vocab_size, stepper.max_positions) == (SHAPE.vocabulary, SHAPE.positions)
    found = stepper.step(IDS, POSITIONS, None, stepper.start(3))
    assert found.shape == (3, SHAPE.vocabulary)


def test_a_trained_model_continues_as_transformers_does() -> None:
    folder = REPOSITORY.parent / "shared" / "data" / "models" / "capp_gpt2_64d"
    if not folder.is_dir():
        pytest.skip("no shared data")
    config = json.loads((folder / "config.json").read_text())
    golden = json.loads((folder / "reference.json").read_text())
    shape = Shape(config["n_layer"], config["n_embd"], config["n_head"], 53, config["n_positions"])
    model = GPT2StepModel(make(load_file(Path(folder) / "model.safetensors"), shape))
    for prompt, expected in zip(golden["input_ids"], golden["greedy_ids"], strict=True):
        ids, cache, begin = list(prompt), model.start(1), 0
        while len(ids) < len(expected):
            new = np.array([ids[begin:]])
            found = model.step(new, np.arange(begin, len(ids))[None], None, cache)
            begin = len(ids)
            ids.append(int(found[0].argmax()))
        assert ids == expected


@pytest.mark.parametrize(
    ("ids", "positions", "text"),
    [
        ([[96]], [[0]], "token 96 does not exist: the vocabulary has 96 tokens"),
        ([[-1]], [[0]], "token -1 does not exist"),
        ([[0]], [[32]], "position 32 does not exist: the model has 32 positions: shorten"),
    ],
)
def test_what_does_not_exist_is_an_error(
    stepper: GPT2StepModel, ids: list[list[int]], positions: list[list[int]], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        stepper.step(np.array(ids), np.array(positions), None, stepper.start(1))


def test_shapes_that_do_not_fit_are_an_error(stepper: GPT2StepModel) -> None:
    one = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(ValueError, match="ids of"):
        stepper.step(one, one, None, stepper.start(2))
    with pytest.raises(ValueError, match="positions of"):
        stepper.step(one, np.zeros((1, 2), dtype=np.int64), None, stepper.start(1))
    with pytest.raises(ValueError, match="the mask of"):
        stepper.step(one, one, np.zeros((1, 3), dtype=bool), stepper.start(1))
