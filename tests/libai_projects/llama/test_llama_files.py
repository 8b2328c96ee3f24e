"""Meta's files, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from safetensors.numpy import save_file

from libai_projects import weights
from libai_projects.weights import convert
from libai_projects.weights.llama import LLAMA
from tests.libai_projects.llama import tiny_llama
from tests.torch_writer import save_torch_file

CASE = "shared heads"
HEADS, KV_HEADS = 8, 2
# Meta's names, and the axis along which files of several processes cut them.
NAMES = {
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "embed_tokens": ("tok_embeddings", 1),
    "norm": ("norm", None),
    "lm_head": ("output", 0),
}


def metas(swapped: bool) -> dict[str, tuple[np.ndarray, int | None]]:
    """Weights as Meta has them: rows i and i + 1 of a head turn together, not i and i + dim / 2."""
    found = {}
    for name, array in tiny_llama.weights(CASE).items():
        module = name.removeprefix("model.").removesuffix(".weight")
        place, _, inner = module.rpartition(".") if "layers" not in module else ("", "", "")
        if "layers" in module:
            _, number, inner = module.split(".", 2)
            place = f"layers.{number}."
        else:
            place, inner = "", module
        if inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = HEADS if "q_proj" in inner else KV_HEADS
            half = len(array) // heads // 2
            rows = [
                head * 2 * half + pair + part * half
                for head in range(heads)
                for pair in range(half)
                for part in (0, 1)
            ]
            array = array[rows]
        theirs, axis = NAMES[inner]
        if swapped and theirs in ("feed_forward.w2", "feed_forward.w3"):
            theirs = "feed_forward.w" + {"2": "3", "3": "2"}[theirs[-1]]
        found[f"{place}{theirs}.weight"] = (array, axis)
    return found


def write_meta(folder: Path, files: int = 1, swapped: bool = False, **params: Any) -> Path:
    folder.mkdir()
    settings = {"dim": 32, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
    settings |= {"norm_eps": 1e-5, "max_seq_len": 64, "vocab_size": -1, **params}
    (folder / "params.json").write_text(json.dumps(settings))
    for number in range(files):
        part = {
            name: array
            if axis is None
            else np.ascontiguousarray(np.split(array, files, axis)[number])
            for name, (array, axis) in metas(swapped).items()
        }
        if files == 1:
            save_torch_file(folder / "consolidated.00.pth", part)
        else:
            save_file(part, folder / f"consolidated.{number:02}.safetensors")
    return folder


@pytest.mark.parametrize(("files", "swapped"), [(1, False), (2, True)])
def test_metas_weights_are_hugging_faces(tmp_path: Path, files: int, swapped: bool) -> None:
    state, config = weights.load(write_meta(tmp_path / "meta", files, swapped), "meta", table=LLAMA)
    written = LLAMA.to_huggingface(state, HEADS)
    for name, array in tiny_llama.weights(CASE).items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    assert config["max_seq_length"] == 64
    assert config["rope_scaling"] is None


def test_the_converter_reads_metas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_meta(tmp_path / "meta", use_scaled_rope=True, max_seq_len=131072)
    options = ["--from", "meta", "--to", "huggingface", "--max-shard-size", "1e-5"]
    assert convert.main([str(source), str(tmp_path / "hf"), *options]) == 0
    state, config = weights.load(tmp_path / "hf", "huggingface", table=LLAMA)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    assert config["rope_scaling"]["rope_type"] == "llama3"
    for name, array in LLAMA.to_huggingface(state, HEADS).items():
        np.testing.assert_array_equal(array, tiny_llama.weights(CASE)[name], err_msg=name)


def test_damaged_folders_of_metas(tmp_path: Path) -> None:
    folder = write_meta(tmp_path / "meta", files=2)
    for change, text in (
        (lambda: (folder / "params.json").write_text("{"), "does not tell n_heads"),
        (lambda: (folder / "params.json").unlink(), "not a model of Meta's"),
    ):
        change()
        with pytest.raises(UserError, match=text):
            weights.load(folder, "meta", table=LLAMA)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mistral"}, "only Llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": "yes"}, "expected true or false"),
        ({"num_attention_heads": 5}, "5 heads do not divide"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'.*linear, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "expected a number above 0"),
        ({"tie_word_embeddings": True}, "differs from"),
    ],
)
def test_wrong_settings(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    content = {**tiny_llama.content(CASE), **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file(tiny_llama.weights(CASE), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=text):
        weights.load(tmp_path, "huggingface", table=LLAMA)
