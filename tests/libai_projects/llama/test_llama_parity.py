"""The Llama computes, trains and generates as transformers' does, from its files
(golden/make_llama_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from oneflow_accel.backends import DeviceProperties
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from libai.utils import distributed as dist
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

from libai_projects import weights
from libai_projects.generation import GenerationOptions, generate
from libai_projects.models import step_model
from libai_projects.models.llama.model import LlamaForPreTraining, LlamaStepModel
from libai_projects.weights.llama import LLAMA
from tests.libai_projects.llama import tiny_llama
from tests.libai_projects.magicprompt.gpt2_models import place

GOLDEN = np.load(Path(__file__).parent / "golden" / "transformers.npz")
PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8]]
GENERATION = {
    "greedy": {"max_new_tokens": 24},
    "penalty": {"max_new_tokens": 24, "repetition_penalty": 1.5},
    "beams": {"max_new_tokens": 12, "num_beams": 3},
}
cases = pytest.mark.parametrize("case", tiny_llama.CASES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory for each case."""
    root = tmp_path_factory.mktemp("llamas")
    for case in tiny_llama.CASES:
        (root / case).mkdir()
        (root / case / "config.json").write_text(json.dumps(tiny_llama.content(case)))
        save_file(tiny_llama.weights(case), root / case / "model.safetensors")
    return root


def build(folder: Path, **options: object) -> LlamaForPreTraining:
    """The model of a folder, by its files alone."""
    layout = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    dist.setup_dist_util(OmegaConf.create(layout))
    state, config = weights.load(folder, "huggingface", table=LLAMA)
    model = LlamaForPreTraining({**config, **options})
    weights.load_into(model, state, table=LLAMA)
    return model


@cases
def test_logits(folders: Path, case: str) -> None:
    ids = tiny_llama.tokens()[:, :-1]
    for options in ({}, {"sequence_first": True}):
        model = build(folders / case, **options).eval()
        with flow.no_grad():
            logits = model(place(ids))["prediction_scores"].numpy()[:, -4:]
        np.testing.assert_allclose(logits, GOLDEN[f"{case}/logits"], rtol=0, atol=1e-4)


@cases
def test_training(folders: Path, case: str) -> None:
    tokens = tiny_llama.tokens()
    model = build(folders / case)
    optimizer = flow.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in GOLDEN[f"{case}/losses"]:
        loss = model(place(tokens[:, :-1]), place(tokens[:, 1:]))["lm_loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.numpy())
    # AdamW's first steps are as long for a gradient of 1e-9 as for one of 1: what the last bits of
    # a sum, which are the CPU's, make of the smallest ones shows in the losses.
    np.testing.assert_allclose(losses, GOLDEN[f"{case}/losses"], rtol=1e-4)


@cases
def test_generated_tokens(folders: Path, case: str) -> None:
    model = LlamaStepModel(build(folders / case).eval())
    content, width = tiny_llama.content(case), tiny_llama.WIDTH
    size = content.get("head_dim", width // content["num_attention_heads"])
    # Two layers of float32; values take multiples of 16.
    both = content["num_key_value_heads"] * (size + -(-size // 16) * 16)
    assert model.bytes_per_token == 2 * 4 * both
    for name, options in GENERATION.items():
        chosen = GenerationOptions.from_config({"eos_token_id": None, "pad_token_id": 0, **options})
        for number, prompt in enumerate(PROMPTS):
            found = generate(model, [prompt], chosen).sequences[0]
            expected = GOLDEN[f"{case}/{name}/{number}"].tolist()
            assert [*prompt, *found.new_tokens] == expected, (name, prompt)


def test_what_a_card_has_no_room_for_is_refused(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaStepModel(build(folders / "linear").eval())
    used, card = 900, DeviceProperties("a card", 2**20, {})
    backend = SimpleNamespace(
        supports=lambda feature: feature != "host_memory",
        properties=lambda: card,
        memory_allocated=lambda: used,
    )
    monkeypatch.setattr(step_model.dist, "get_backend", lambda: backend)
    options = {"eos_token_id": None, "pad_token_id": 0, **GENERATION["greedy"]}
    chosen = GenerationOptions.from_config(options)
    assert generate(model, [PROMPTS[0]], chosen).sequences
    used = 2**20 - 900
    with pytest.raises(UserError, match="ask for fewer"):
        generate(model, [PROMPTS[0]], chosen)


def test_prompts_of_several_lengths_at_once(folders: Path) -> None:
    """Rows that begin with padding have other places in the row, and the same differences."""
    for case in ("shared heads", "llama3"):
        model = LlamaStepModel(build(folders / case).eval())
        for name in ("greedy", "beams"):
            options = {"eos_token_id": None, "pad_token_id": 0, **GENERATION[name]}
            chosen = GenerationOptions.from_config(options)
            found = generate(model, PROMPTS, chosen).sequences
            for number, (prompt, sequence) in enumerate(zip(PROMPTS, found, strict=True)):
                expected = GOLDEN[f"{case}/{name}/{number}"].tolist()
                assert [*prompt, *sequence.new_tokens] == expected, (case, name, prompt)


@cases
def test_files_back_and_forth(folders: Path, case: str, tmp_path: Path) -> None:
    state, config = weights.load(folders / case, "huggingface", table=LLAMA)
    weights.save_huggingface(state, config, tmp_path / "hf", table=LLAMA)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    expected = tiny_llama.weights(case)
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key, value in tiny_llama.content(case).items():
        if key == "rope_parameters":
            rope = {**(settings["rope_scaling"] or {}), "rope_theta": settings["rope_theta"]}
            value.pop("rope_type") if value["rope_type"] == "default" else None
            assert rope == value
        elif key != "num_key_value_heads" or settings[key] is not None:
            assert settings[key] == value, key
    # A LiBai checkpoint tells the rest by its settings.
    weights.save_libai(state, config, tmp_path / "libai", LLAMA)
    again, known = weights.load(tmp_path / "libai", "libai", table=LLAMA)
    assert {key: config[key] for key in known} == known
    for name, array in state.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
