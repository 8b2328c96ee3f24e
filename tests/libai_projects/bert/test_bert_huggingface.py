"""BERT's weights in and out of Hugging Face's files, and what it computes with them, against
transformers (golden/make_hf_bert.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from libai.utils import distributed as dist
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

from libai_projects import weights
from libai_projects.models.bert.model import BertPretrainingModel
from libai_projects.models.families import family_of
from libai_projects.weights import convert
from libai_projects.weights.bert import BERT
from tests.launch import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "data" / "hf_bert"
EXPECTED = np.load(GOLDEN / "expected.npz")
SEEN = EXPECTED["attention_mask"] == 1
INPUTS = {
    "input_ids": EXPECTED["input_ids"],
    "attention_mask": EXPECTED["attention_mask"],
    "tokentype_ids": EXPECTED["token_type_ids"],
}
DROPOUT = ("embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob")


def made(config: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> BertPretrainingModel:
    layout = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    dist.setup_dist_util(OmegaConf.create(layout))
    model = BertPretrainingModel({**config, **dict.fromkeys(DROPOUT, 0.0)})
    weights.load_into(model, state, table=BERT)
    return model.eval()


def computed(model: BertPretrainingModel, **more: np.ndarray) -> dict[str, np.ndarray]:
    place = {"placement": dist.get_layer_placement(0), "sbp": dist.get_hidden_sbp()}
    given = {name: flow.tensor(values, **place) for name, values in {**INPUTS, **more}.items()}
    with flow.no_grad():
        return {name: value.numpy() for name, value in model(**given).items()}


def copied(folder: Path, **changes: object) -> Path:
    shutil.copytree(GOLDEN, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [61, 64])
def test_logits_and_losses_are_those_of_transformers(fused: bool, rows: int) -> None:
    state, config = weights.load(GOLDEN, "huggingface", table=BERT)
    model = made({**config, "attention_fusion": fused, "vocab_size": rows}, state)
    found = computed(model)
    logits = found["prediction_scores"]
    assert np.abs(logits[..., :61] - EXPECTED["logits"])[SEEN].max() < 1e-5
    assert np.abs(found["seq_relationship_score"] - EXPECTED["order"]).max() < 1e-5
    places = EXPECTED["labels"] >= 0
    masked = logits[places].argmax(-1)
    np.testing.assert_array_equal(masked, EXPECTED["logits"][places].argmax(-1))
    given = {"labels": EXPECTED["labels"], "ns_labels": EXPECTED["next_sentence_label"]}
    losses = computed(model.train(), **given)
    assert losses.keys() == {"lm_loss", "sop_loss"}
    assert sum(losses.values()) == pytest.approx(float(EXPECTED["loss"]), abs=1e-5)
    found = computed(model.eval(), **given)
    mean = found["token_losses"].sum() / found["token_mask"].sum()
    assert mean == pytest.approx(losses["lm_loss"], abs=1e-5)
    right = EXPECTED["logits"].argmax(-1) == EXPECTED["labels"]
    np.testing.assert_array_equal(found["token_hits"] * found["token_mask"], right & places)
    order = EXPECTED["order"].argmax(-1) == EXPECTED["next_sentence_label"]
    np.testing.assert_array_equal(found["order_hits"].ravel(), order)


def test_export_is_what_transformers_writes(tmp_path: Path) -> None:
    """By the command, by way of LiBai's form; a padded vocabulary is cut again."""
    way = [("huggingface", "libai", GOLDEN), ("libai", "huggingface", tmp_path / "libai")]
    for source, target, place in way:
        model = [] if source == "huggingface" else ["--model", "bert"]
        options = [str(place), str(tmp_path / target), "--from", source, "--to", target, *model]
        assert convert.main(options) == 0
    ours = load_file(tmp_path / "huggingface" / "model.safetensors")
    theirs = load_file(GOLDEN / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    content = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    golden = json.loads((GOLDEN / "config.json").read_text())
    assert content.pop("torch_dtype") == golden["dtype"]
    assert content == {name: golden[name] for name in content}
    assert {"num_hidden_layers", "type_vocab_size", "tie_word_embeddings"} <= content.keys()


def test_a_model_of_masked_tokens_only_and_first_names(tmp_path: Path) -> None:
    """BertForMaskedLM has no pooler; the first files call a norm's weights gamma and beta, and
    have the head, its bias and positions as well."""
    folder = copied(tmp_path / "model", architectures=["BertForMaskedLM"])
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "pooler" in name or "seq_relationship" in name]:
        del state[name]
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, array in state.items():
        end = ".".join(name.split(".")[-2:])
        old[name.replace(end, names.get(end, end))] = array
    old["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    old["bert.embeddings.position_ids"] = np.arange(24)[None]
    save_file(old, folder / "model.safetensors")
    ours, config = weights.load(folder, "huggingface", table=BERT)
    assert config["masked_lm_only"] is True
    found = computed(made(config, ours))
    assert found.keys() == {"prediction_scores"}
    assert np.abs(found["prediction_scores"] - EXPECTED["logits"])[SEEN].max() < 1e-5
    weights.save_huggingface(made(config, ours), config, tmp_path / "out", table=BERT)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == ["BertForMaskedLM"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'gpt2'"),
        ({"is_decoder": True}, "is_decoder is True; every token sees all others"),
        ({"tie_word_embeddings": False}, "the head is the token embedding"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"num_hidden_layers": 3}, "12 missing"),
        ({"architectures": ["BertForMaskedLM"]}, "4 unexpected"),
    ],
)
def test_config_that_does_not_fit(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        weights.load(copied(tmp_path / "model", **changes), "huggingface", table=BERT)


def test_a_bert_does_not_generate() -> None:
    with pytest.raises(UserError, match="cannot generate here; those that can: GPT-2 and Llama"):
        family_of(BertPretrainingModel)
