"""load_into and save_huggingface on global models: one process, and two in every kind of layout."""

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


def test_two_processes(tmp_path: Path) -> None:
    program = REPOSITORY / "tests" / "libai_projects" / "weights" / "load_on_two_processes.py"
    result = run_distributed([program, tmp_path, GOLDEN], 2, timeout=60)
    assert result.returncode == 0, result.stdout
    golden = golden_state()
    exported = load_file(GOLDEN / "model.safetensors")
    layouts = ["data", "tensor", "pipeline", "second_only", "zero"]
    for layout in layouts:
        for rank in (0, 1):
            with np.load(tmp_path / f"{layout}-{rank}.npz") as arrays:
                assert arrays.files == list(golden)
                for name, array in golden.items():
                    np.testing.assert_array_equal(arrays[name][: len(array)], array, err_msg=name)
                    assert not arrays[name][len(array) :].any()
        ours = load_file(tmp_path / layout / "model.safetensors")
        assert ours.keys() == exported.keys()
        for name, array in exported.items():
            np.testing.assert_array_equal(ours[name], array, err_msg=name)
    for rank in (0, 1):
        errors = json.loads((tmp_path / f"errors-{rank}.json").read_text())
        assert "does not exist" in errors["load"]
        assert "1 missing" in errors["load_into"]
        assert "is not empty" in errors["save"]
