"""A Llama with Monarch and block-diagonal layers: its function, files and options; layouts:
test_parallel_layouts.py, runs: test_llama_pretrain.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from libai.utils import distributed as dist
from omegaconf import OmegaConf
from safetensors.numpy import load_file

from libai_projects import weights
from libai_projects.generation.interface import ModelState
from libai_projects.models.llama.model import LlamaForPreTraining, LlamaStepModel
from libai_projects.projects.Llama import estimate
from libai_projects.projects.Llama import flags as flag_table
from libai_projects.weights import monarch
from libai_projects.weights.llama import LLAMA
from tests.libai_projects.llama import tiny_llama
from tests.libai_projects.magicprompt import gpt2_monarch_weights
from tests.libai_projects.magicprompt.gpt2_models import LAYER, place
from tests.tolerances import assert_close

WIDTH, INNER = tiny_llama.WIDTH, tiny_llama.INNER
CONFIG = {
    "num_layers": tiny_llama.LAYERS,
    "vocab_size": tiny_llama.VOCABULARY,
    "hidden_size": WIDTH,
    "ffn_hidden_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_seq_length": 64,
    "rms_norm_epsilon": 1e-5,
    "initializer_range": 0.2,
}
MLP = {"mlp_cfg": "monarch"}
# 3 divides no width.
ALL = {
    "mlp_cfg": {"_target_": LAYER, "nblocks": 3},
    "attnlinear_cfg": "monarch",
    "attnproj_cfg": {"_target_": "blockdiag", "nblocks": 3},
}
BLOCKS = {"mlp_cfg": "blockdiag", "attnlinear_cfg": "blockdiag"}
BLOCKS |= {"attention_bias": True, "mlp_bias": True}
PAIR: dict[str, Any] = {
    "mlp_cfg": {"_target_": "monarch_flow.layers.MlpCustom", "linear1_cfg": None}
}
PAIR["mlp_cfg"]["linear2_cfg"] = {"_target_": LAYER, "nblocks": 5}
# With the number of structured layers of a block.
CASES = {"mlp": (MLP, 3), "all": (ALL, 7), "blocks": (BLOCKS, 6), "pair": (PAIR, 1)}
cases = pytest.mark.parametrize(("options", "layers"), CASES.values(), ids=CASES)
IDS = tiny_llama.tokens()[:, :-1]


def build(**options: Any) -> LlamaForPreTraining:
    layout = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    dist.setup_dist_util(OmegaConf.create(layout))
    flow.manual_seed(3)
    return LlamaForPreTraining({**CONFIG, **options}).eval()


def logits(model: LlamaForPreTraining) -> np.ndarray:
    with flow.no_grad():
        return model(place(IDS))["prediction_scores"].numpy()


def dense(state: dict[str, np.ndarray], module: str, rows: int, columns: int) -> np.ndarray:
    """The matrix (out, in) of a structured module, in float64."""
    if f"{module}.blkdiag1" in state:
        factors = (state[f"{module}.{name}"] for name in ("blkdiag1", "blkdiag2"))
        return gpt2_monarch_weights.dense(*factors)[:rows, :columns]
    return gpt2_monarch_weights.block_diagonal(state[f"{module}.weight"])[:rows, :columns]


@cases
def test_a_hugging_face_folder_has_the_dense_model(
    options: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    """Whose logits are transformers' (test_llama_parity.py), and single steps'."""
    model = build(**options)
    weights.save_huggingface(model, {**CONFIG, **options}, tmp_path / "hf", table=LLAMA)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    own = weights.gather_state(model, LLAMA)
    structured = {name.rpartition(".")[0] for name, array in own.items() if array.ndim == 3}
    for module in structured:
        array = written[LLAMA.their_prefix + LLAMA.their_name(f"{module}.weight")]
        assert_close(array, dense(own, module, *array.shape), reduced=8)
    assert len(structured) == 2 * layers
    expected = logits(model)
    state, config = weights.load(tmp_path / "hf", "huggingface", table=LLAMA)
    same = build(**config)
    weights.load_into(same, state, table=LLAMA)
    assert_close(logits(same), expected, reduced=INNER)
    cache, begin = ModelState(LlamaStepModel(model), len(IDS)), 0
    for end in (7, 8, 9, 21):
        found = cache.read(IDS[:, begin:end])
        assert_close(found, expected[:, end - 1], reduced=INNER)
        begin = end


@cases
def test_weights_tell_which_layers_are_structured(options: dict[str, Any], layers: int) -> None:
    """And settings what padding hides."""
    shapes = LLAMA.shapes({**CONFIG, **options})
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found = LLAMA.sizes_of(state, CONFIG)
    assert monarch.layers(found) == monarch.layers(options)
    assert (
        sum(len(shape) == 3 for name, shape in shapes.items() if "blkdiag2" not in name)
        == 2 * layers
    )
    assert found["ffn_hidden_size"] == INNER
    assert LLAMA.shapes({**CONFIG, **found}) == shapes
    model = build(**options)
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == shapes
    # Without settings, or with another run's.
    for known in ({}, {"ffn_hidden_size": 4 * INNER}):
        padded = 81 if options is ALL else INNER
        assert LLAMA.sizes_of(state, known)["ffn_hidden_size"] == padded


def test_the_estimate_counts_factors() -> None:
    """Of --preset=small by closed forms: monarch_spec 1.3, with 4 blocks."""
    dense, factored = (
        estimate.Job.of(flag_table.parse(["--preset=small", *argv]))
        for argv in ([], ["--mlp_cfg=monarch"])
    )
    # (n^2 + n m) / 4 in place of n m, in three layers of 12 blocks.
    saved = 12 * 3 * (768 * 2048 - (768**2 + 768 * 2048) // 4)
    counts = [estimate.parameters(job) for job in (dense, factored)]
    assert counts[0]["MLP"][0] - counts[1]["MLP"][0] == saved
    assert dense.flops_per_token - factored.flops_per_token == 6 * saved
    assert estimate.step_seconds(factored, estimate.GPUS["A100"], []) > 0
    peaks = [estimate.cpu_peak(job) for job in (dense, factored)]
    # Between factors of 3 layers are as many numbers as the width.
    more = 12 * 3 * 768 * dense.rows * 4
    assert peaks[1]["activations"] - peaks[0]["activations"] == more
    assert peaks[0]["weights"] - peaks[1]["weights"] == 4 * saved
