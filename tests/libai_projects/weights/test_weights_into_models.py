"""load_into and save_huggingface: a model of one process, and of two in every layout."""

from __future__ import annotations

import json
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from safetensors.numpy import load_file

from libai_projects import weights
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.table import resize_vocabulary
from tests.launch import REPOSITORY, run_distributed
from tests.libai_projects.weights.parameters_only import CONFIG, ParametersOnly, golden_state

WORKER = Path(__file__).with_name("layouts_of_weights.py")
CAPP = REPOSITORY.parent / "shared" / "data" / "models" / "capp_gpt2_64d"
GOLDEN = REPOSITORY / "tests" / "data" / "hf_gpt2" / "safetensors"


def test_local_model_with_more_rows() -> None:
    model = ParametersOnly({**CONFIG, "vocab_size": 128})
    state, _ = weights.load(GOLDEN, "huggingface")
    weights.load_into(model, state)
    golden = golden_state()
    for name, parameter in model.named_parameters():
        array = parameter.numpy()
        if name == GPT2.tokens:
            assert not array[61:].any()
            array = array[:61]
        np.testing.assert_array_equal(array, golden[name], err_msg=name)


def test_rows_are_not_cut_down() -> None:
    padded = golden_state()
    tokens = padded[GPT2.tokens]
    padded[GPT2.tokens] = resize_vocabulary(tokens, 128)
    model = ParametersOnly({**CONFIG, "vocab_size": 64})
    with pytest.raises(UserError, match=r"\(128, 16\), expected \(64, 16\)"):
        weights.load_into(model, padded)


def test_differences_leave_the_model_as_it_was() -> None:
    model = ParametersOnly(CONFIG)
    nn.init.constant_(model.GPT_model.transformer.layernorm_f.weight, 7)
    state = golden_state()
    state["GPT_model.extra"] = np.zeros(1, np.float32)
    del state["GPT_model.transformer.layernorm_f.bias"]
    with pytest.raises(UserError) as error:
        weights.load_into(model, state)
    assert "1 missing (such as GPT_model.transformer.layernorm_f.bias)" in str(error.value)
    assert "1 unexpected (such as GPT_model.extra)" in str(error.value)
    assert (model.GPT_model.transformer.layernorm_f.weight.numpy() == 7).all()


def test_bare_model_and_lower_precision(tmp_path: Path) -> None:
    model = ParametersOnly(CONFIG).GPT_model.to(flow.float16)
    weights.load_into(model, golden_state())
    array = model.transformer.layernorm_f.weight
    assert array.dtype == flow.float16
    weights.save_huggingface(model, CONFIG, tmp_path / "out")
    golden = load_file(GOLDEN / "model.safetensors")
    for name, array in load_file(tmp_path / "out" / "model.safetensors").items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, golden[name].astype(np.float16), err_msg=name)


def test_logits_and_exports_in_every_layout_of_two_processes(tmp_path: Path) -> None:
    """Published weights in our model give transformers' logits, and go back unchanged."""
    models = {GOLDEN: GOLDEN.parent / "expected.npz"}
    if CAPP.is_dir():
        models[CAPP] = CAPP / "reference.npz"
    given = [f"{folder}={reference}" for folder, reference in models.items()]
    result = run_distributed([WORKER, tmp_path, *given], 2, timeout=100)
    assert result.returncode == 0, result.stdout
    for folder, reference in models.items():
        golden, expected = load_file(folder / "model.safetensors"), np.load(reference)["logits"]
        vocabulary = expected.shape[-1]
        for layout in ("data", "tensor", "pipeline"):
            name = tmp_path / f"{folder.name}-{layout}"
            actual = np.load(f"{name}.npy")
            assert np.abs(actual[..., :vocabulary] - expected).max() < 1e-4
            # Padding is masked: no token of it is ever chosen.
            assert actual.shape[-1] == 128
            assert actual[..., vocabulary:].max() < -1e3
            exported = load_file(name / "model.safetensors")
            assert exported.keys() == golden.keys()
            for key, array in golden.items():
                np.testing.assert_array_equal(exported[key], array, err_msg=key)
    for rank in (0, 1):
        errors = json.loads((tmp_path / f"errors-{rank}.json").read_text())
        for error, words in zip(
            errors, ("does not exist", "1 missing", "is not empty"), strict=True
        ):
            assert words in error
