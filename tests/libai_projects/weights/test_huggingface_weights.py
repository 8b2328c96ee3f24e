"""Hugging Face folders in and out, against transformers and torch (golden/make_hf_gpt2.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from libai_projects import weights
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.table import State, resize_vocabulary
from tests.launch import REPOSITORY
from tests.libai_projects import reference_gpt2
from tests.libai_projects.weights.parameters_only import CONFIG

GOLDEN = REPOSITORY / "tests" / "data" / "hf_gpt2"


def logits_of(state: State, heads: int, ids: np.ndarray) -> np.ndarray:
    """Logits of a state in LiBai's layout, by way of the inverse mapping and a float64 GPT-2."""
    return reference_gpt2.forward(GPT2.to_huggingface(state, heads), ids, heads)


def changed_config(folder: Path, **changes: object) -> Path:
    shutil.copytree(GOLDEN / "safetensors", folder)
    content = json.loads((folder / "config.json").read_text())
    content.update(changes)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin_sharded", "bfloat16"])
def test_reads_what_transformers_wrote(kind: str) -> None:
    state, config = weights.load(GOLDEN / kind, "huggingface")
    expected = np.load(GOLDEN / "expected.npz")
    prefix = "bfloat16_" if kind == "bfloat16" else ""
    # to_libai is another hand's mapping; the logits are transformers'.
    if kind == "safetensors":
        golden = reference_gpt2.to_libai(load_file(GOLDEN / kind / "model.safetensors"), 4)
        assert state.keys() == golden.keys()
        for name, array in golden.items():
            np.testing.assert_array_equal(state[name], array, err_msg=name)
    assert all(array.dtype == np.float32 for array in state.values())
    actual = logits_of(state, 4, expected["input_ids"])
    assert np.abs(actual - expected[f"{prefix}logits"]).max() < 1e-4
    assert config == {
        **CONFIG,
        "embedding_dropout_prob": 0.1,
        "attention_dropout_prob": 0.1,
        "output_dropout_prob": 0.1,
        "layernorm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "activation": "gelu_tanh",
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    }


def test_export_is_what_transformers_writes(tmp_path: Path) -> None:
    state, config = weights.load(GOLDEN / "safetensors", "huggingface")
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text("{}")
    folder = tmp_path / "out"
    weights.save_huggingface(
        state,
        config,
        folder,
        generation={"bos_token_id": 60, "eos_token_id": 60},
        tokenizer_files=[vocabulary],
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "vocab.json",
    ]
    with (
        safe_open(folder / "model.safetensors", "np") as ours,
        safe_open(GOLDEN / "safetensors" / "model.safetensors", "np") as theirs,
    ):
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118  (safe_open cannot be iterated)
            assert ours.get_tensor(name).dtype == np.float32
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name))
    ours_config = json.loads((folder / "config.json").read_text())
    theirs_config = json.loads((GOLDEN / "safetensors" / "config.json").read_text())
    assert ours_config.pop("torch_dtype") == theirs_config["dtype"]
    assert ours_config == {name: theirs_config[name] for name in ours_config}
    assert {"n_layer", "n_inner", "bos_token_id", "architectures"} <= ours_config.keys()
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 60,
        "eos_token_id": 60,
    }


def test_export_leaves_padding_out_and_rounds_to_bfloat16(tmp_path: Path) -> None:
    state, config = weights.load(GOLDEN / "safetensors", "huggingface")
    tokens = state[GPT2.tokens]
    state[GPT2.tokens] = resize_vocabulary(tokens, 128)
    config["vocab_size"] = 128
    folder = tmp_path / "out"
    weights.save_huggingface(state, config, folder, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 61
    again, _ = weights.load(folder, "huggingface")
    golden, _ = weights.load(GOLDEN / "bfloat16", "huggingface")
    for name, array in golden.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'"),
        ({"activation_function": "silu"}, "activation_function is 'silu'"),
        ({"tie_word_embeddings": False}, r"1 missing \(such as lm_head.weight"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"n_head": 3}, "3 heads do not divide"),
        ({"n_layer": "2"}, "n_layer is '2'"),
        ({"n_inner": None}, "6 mis-shaped"),
        ({"n_layer": 1}, "12 unexpected"),
        ({"n_layer": 3}, "12 missing"),
    ],
)
def test_config_that_does_not_fit(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    folder = changed_config(tmp_path / "model", **changes)
    with pytest.raises(UserError, match=words):
        weights.load(folder, "huggingface")


def test_erf_gelu_is_kept(tmp_path: Path) -> None:
    folder = changed_config(tmp_path / "model", activation_function="gelu")
    state, config = weights.load(folder, "huggingface")
    assert config["activation"] == "gelu"
    weights.save_huggingface(state, config, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["activation_function"] == "gelu"


def test_a_head_of_its_own_and_other_options(tmp_path: Path) -> None:
    """Only where config.json says that there is one; LiBai's form tells it by the weight."""
    folder = changed_config(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"] + 1
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"`lm_head\.weight` differs"):
        weights.load(folder, "huggingface")
    changes = {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}
    changes["tie_word_embeddings"] = False
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    loaded, config = weights.load(folder, "huggingface")
    weights.save_libai(loaded, config, tmp_path / "libai")
    again, known = weights.load(tmp_path / "libai", "libai")
    assert known.items() <= config.items()
    weights.save_huggingface(again, known, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content == content | changes
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        weights.load(tmp_path / "absent", "huggingface")
    with pytest.raises(UserError, match=r"no config\.json"):
        weights.load(tmp_path, "huggingface")
    folder = changed_config(tmp_path / "truncated")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"truncated/model.safetensors: truncated or corrupt"):
        weights.load(folder, "huggingface")
    path.unlink()
    with pytest.raises(UserError, match="no weights"):
        weights.load(folder, "huggingface")
    (folder / "config.json").write_text('{"model_type": "gp')
    with pytest.raises(UserError, match="is not JSON"):
        weights.load(folder, "huggingface")


def test_broken_index(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(GOLDEN / "sharded", folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["transformer.wte.weight"]
    (folder / shard).unlink()
    with pytest.raises(UserError, match=f"{shard} is missing"):
        weights.load(folder, "huggingface")
    content["weight_map"]["transformer.wte.weight"] = "../secret"
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="must lie beside it"):
        weights.load(folder, "huggingface")


def test_existing_folders_are_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, config = weights.load(GOLDEN / "safetensors", "huggingface")
    folder = tmp_path / "out"
    weights.save_huggingface(state, config, folder)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--force"):
        weights.save_huggingface(state, config, folder)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("libai_projects.weights.huggingface.write_synced", full_disk)
        with pytest.raises(UserError, match="No space left on device; free some space"):
            weights.save_huggingface(state, config, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() == before
    weights.save_huggingface(state, config, folder, dtype="float16", force=True)
    assert (folder / "model.safetensors").stat().st_size < len(before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        weights.save_huggingface(state, config, folder, force=True)
