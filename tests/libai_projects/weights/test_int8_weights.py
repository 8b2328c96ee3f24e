"""Linear weights stored as 8-bit integers with scales: what is in the file, and what is read."""

from __future__ import annotations

import json
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from libai_projects import weights
from libai_projects.weights import convert
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.llama import LLAMA
from tests.launch import REPOSITORY
from tests.libai_projects.llama import tiny_llama

GOLDEN = REPOSITORY / "tests" / "data" / "hf_gpt2" / "safetensors"
TO_INT8 = ("--from", "huggingface", "--to", "huggingface", "--dtype", "int8")
FILE = "model.safetensors"


def source(tmp_path: Path, model: str) -> Path:
    if model == "gpt2":
        return GOLDEN
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_llama.content("shared heads")))
    save_file(tiny_llama.weights("shared heads"), folder / FILE)
    return folder


def converted(*args: str | Path) -> None:
    assert convert.main([str(arg) for arg in args]) == 0


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_file_of_int8(tmp_path: Path, model: str) -> None:
    folder, out = source(tmp_path, model), tmp_path / "int8"
    converted(folder, out, *TO_INT8)
    before, after = load_file(folder / FILE), load_file(out / FILE)
    whole = load_file(folder / FILE)
    # GPT-2's linear weights are (in, out) in a file, its head is the embedding.
    outputs = 1 if model == "gpt2" else 0
    linear = {name for name, array in before.items() if array.ndim == 2}
    linear -= {name for name in linear if "embed" in name or ".wte." in name or ".wpe." in name}
    assert after.keys() == before.keys() | {f"{name}.scales" for name in linear}
    for name, array in before.items():
        if name not in linear:
            np.testing.assert_array_equal(after[name], array, err_msg=name)
            continue
        axis = 0 if name == "lm_head.weight" else outputs
        rows = np.moveaxis(array.astype(np.float64), axis, 0)
        scales = (np.abs(rows).max(1) / 127).astype(np.float32)
        np.testing.assert_allclose(after[f"{name}.scales"], scales, rtol=2e-7)
        numbers = np.moveaxis(after[name], axis, 0)
        assert numbers.dtype == np.int8
        assert np.abs(numbers).max(1).tolist() == [127] * len(rows)
        assert np.abs(rows / scales[:, None] - numbers).max() < 0.5001
        whole[name] = np.moveaxis(numbers * after[f"{name}.scales"][:, None], 0, axis)
    # Whoever knows no such weights does not take them for others.
    assert "quant_method" in json.loads((out / "config.json").read_text())["quantization_config"]
    table, heads = (GPT2, 4) if model == "gpt2" else (LLAMA, 8)
    state, _ = weights.load(out, "huggingface", table=table)
    for name, array in table.to_huggingface(state, heads).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, whole[name], err_msg=name)
    # Numbers read back are the same ones again, to the last bit, also where the scales of some
    # weights are in another file than these.
    converted(out, tmp_path / "shards", *TO_INT8, "--max-shard-size", "1e-5")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    sharded, _ = weights.load(tmp_path / "shards", "huggingface", table=table)
    assert all(np.array_equal(sharded[name], array) for name, array in state.items())


def test_scales_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    converted(GOLDEN, tmp_path / "int8", *TO_INT8)
    file = tmp_path / "int8" / FILE
    state = load_file(file)
    name = "transformer.h.0.mlp.c_fc.weight.scales"
    for changed, text in (
        (None, "there is none"),
        (state[name][:-1], r"not float32 \(39,\)"),
        (state[name].astype(np.float64), r"not float64 \(40,\)"),
    ):
        others = {key: array for key, array in state.items() if key != name}
        save_file(others if changed is None else {**others, name: changed}, file)
        with pytest.raises(UserError, match=rf"c_fc.weight is int8 and needs .*\(40,\), {text}"):
            weights.load(tmp_path / "int8", "huggingface")
