"""GPT-2 with Monarch layers by config: the function and options (monarch_spec 6.2);
layouts: test_parallel_layouts.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from libai.utils import distributed as dist
from omegaconf import OmegaConf
from safetensors.numpy import load_file

from libai_projects import weights
from libai_projects.command.checks import Layout, check_model
from libai_projects.generation.interface import ModelState
from libai_projects.models.gpt2 import options as model_options
from libai_projects.models.gpt2.model import GPT2ForPreTraining, GPT2StepModel
from libai_projects.weights import monarch
from libai_projects.weights.gpt2 import GPT2
from tests.libai_projects import reference_gpt2
from tests.libai_projects.magicprompt import gpt2_monarch_weights
from tests.libai_projects.magicprompt.gpt2_models import BLOCKS, LAYER, MONARCH, logits, place
from tests.libai_projects.reference_gpt2 import Shape
from tests.tolerances import assert_close

SHAPE = Shape()
IDS = np.random.default_rng(1).integers(0, SHAPE.vocabulary, (2, 21))
MLP = {"mlp_cfg": "monarch"}
ONE_OF_TWO = {
    "mlp_cfg": {
        "_target_": "monarch_flow.layers.MlpCustom",
        "linear1_cfg": None,
        # 256 -> 64: 3 divides neither.
        "linear2_cfg": {"_target_": LAYER, "nblocks": 3},
        "drop_btw_fcs": False,
    }
}
UNFUSED = {"attention_fusion": False, "bias_dropout_fusion": False, "bias_gelu_fusion": False}


def config(**options: Any) -> dict[str, Any]:
    return {**SHAPE.config(), **options}


def build(**options: Any) -> tuple[GPT2ForPreTraining, dict[str, np.ndarray]]:
    """A model on one process, in evaluation, and the dense weights of the same function."""
    layout = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    dist.setup_dist_util(OmegaConf.create(layout))
    model = GPT2ForPreTraining(OmegaConf.create(config(**options)))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    state, reference = gpt2_monarch_weights.of_model(shapes, SHAPE)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(place(state[name]))
    return model.eval(), reference


@pytest.mark.parametrize("options", [MLP, ONE_OF_TWO, {**MONARCH, **UNFUSED}], ids=str)
def test_logits_are_those_of_the_factors_multiplied_out(options: dict[str, Any]) -> None:
    model, reference = build(**options)
    expected = reference_gpt2.forward(reference, IDS, SHAPE.heads)
    assert_close(logits(model, IDS), expected, reduced=SHAPE.width)


@pytest.mark.parametrize("fused", [True, False])
def test_the_erf_form_with_the_bias_apart(fused: bool) -> None:
    model, reference = build(**MLP, activation="gelu", bias_gelu_fusion=fused)
    expected = reference_gpt2.forward(reference, IDS, SHAPE.heads, gelu="erf")
    assert_close(logits(model, IDS), expected, reduced=SHAPE.width)


@pytest.mark.parametrize("options", [MONARCH, ONE_OF_TWO, BLOCKS], ids=str)
def test_single_steps_are_the_references(options: dict[str, Any]) -> None:
    model, reference = build(**options)
    expected = reference_gpt2.forward(reference, IDS, SHAPE.heads)
    state, begin = ModelState(GPT2StepModel(model), len(IDS)), 0
    for end in (7, 8, 9, 21):
        found = state.read(IDS[:, begin:end])
        assert_close(found, expected[:, end - 1], reduced=SHAPE.width)
        begin = end


@pytest.mark.parametrize("options", [{}, MONARCH, ONE_OF_TWO, BLOCKS], ids=str)
def test_weights_tell_which_layers_are_monarch_layers(options: dict[str, Any]) -> None:
    shapes = GPT2.shapes(config(**options))
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found = GPT2.sizes_of(state)
    assert monarch.layers(found) == monarch.layers(options)
    assert GPT2.shapes(found) == shapes
    assert {key for key in monarch.KEYS if key in found} == set(options)


@pytest.mark.parametrize(
    ("width", "layers", "options", "count"),
    [
        (768, 12, {}, 124_439_808),
        (1024, 24, MLP, 216_411_136),
        (768, 12, dict.fromkeys(monarch.KEYS, "monarch"), 71_355_648),
    ],
)
def test_parameter_counts_of_the_spec(
    width: int, layers: int, options: dict[str, Any], count: int
) -> None:
    sizes = {"num_layers": layers, "hidden_size": width, "ffn_hidden_size": 4 * width}
    model = {**sizes, "vocab_size": 50257, "max_seq_length": 1024, **options}
    shapes = GPT2.shapes(model)
    assert sum(math.prod(shape) for shape in shapes.values()) == count


def test_flops_count_the_factors() -> None:
    cfg = OmegaConf.create(config(**MLP))
    # 4 x 64 x 64 of attention, two pairs of factors, the logits; scores of 32 tokens.
    weights = 2 * (4 * 64**2 + 2 * 4 * (16 * 16 + 64 * 16)) + 96 * 64
    assert GPT2.flops_per_token(cfg) == 6 * weights + 12 * 2 * 64 * 32


def test_a_new_model_leaves_the_factors_as_the_layer_draws_them() -> None:
    build()
    flow.manual_seed(0)
    model = GPT2ForPreTraining(config(**MLP, hidden_size=256, ffn_hidden_size=1024))
    block = model.GPT_model.transformer.layers[0].mlp
    for layer, widths in ((block.dense_h_to_4h, (64, 64)), (block.dense_4h_to_h, (256, 64))):
        for factor, width in zip((layer.blkdiag1, layer.blkdiag2), widths, strict=True):
            values = factor.numpy()
            assert abs(values).max() <= width**-0.5
            assert values.std() == pytest.approx((3 * width) ** -0.5, rel=0.02)
        assert layer.bias.numpy().any()


def test_a_hugging_face_folder_has_the_dense_model(tmp_path: Path) -> None:
    for name, options in (("all", MONARCH), ("one of two", ONE_OF_TWO), ("blocks", BLOCKS)):
        model, _ = build(**options)
        weights.save_huggingface(model, config(**options), tmp_path / name)
        state = load_file(tmp_path / name / "model.safetensors")
        assert state["transformer.h.0.attn.c_attn.weight"].shape == (64, 192)
        expected = reference_gpt2.forward(state, IDS, SHAPE.heads)
        assert_close(logits(model, IDS), expected, reduced=SHAPE.width)


def test_weights_go_in_and_out() -> None:
    model, _ = build(**MONARCH)
    # On one process the arrays share the parameters' memory.
    before = {name: values.copy() for name, values in weights.gather_state(model).items()}
    weights.load_into(model, {name: 2 * values for name, values in before.items()})
    for name, values in weights.gather_state(model).items():
        np.testing.assert_array_equal(values, 2 * before[name])
    with pytest.raises(UserError, match=r"30 missing \(such as .*q_proj.bias"):
        weights.load_into(model, weights.gather_state(build()[0]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mlp_cfg": "monrach"}, "model.cfg.mlp_cfg: there is no linear layer.*'monarch'"),
        ({"mlp_cfg": {"_target_": LAYER, "nblock": 4}}, "no option 'nblock'.*'nblocks'"),
        ({"attnlinear_cfg": "low_rank"}, "attnlinear_cfg: .*not LowRank"),
        ({"mlp_cfg": {"_target_": "blockdiag", "shuffle": True}}, "mlp_cfg.shuffle"),
        ({"mlp_cfg": {"_target_": LAYER, "nblocks": 0}}, "mlp_cfg.nblocks=0"),
        ({"mlp_cfg": {"_target_": LAYER, "bias": False}}, "mlp_cfg.bias"),
        (
            {"mlp_cfg": {"_target_": "monarch_flow.layers.MlpCustom", "linear1": "monarch"}},
            "mlp_cfg.linear1: .*linear1_cfg, linear2_cfg",
        ),
    ],
    ids=str,
)
def test_a_wrong_option_is_an_error_before_the_run_and_in_the_model(
    options: dict[str, Any], text: str
) -> None:
    cfg = OmegaConf.create({"model": {"cfg": config(**options)}, "train": {}})
    with pytest.raises(UserError, match=text):
        check_model(cfg, Layout(1, 1, 1))
    with pytest.raises(UserError, match=text):
        model_options.from_config(cfg.model.cfg)


def test_blocks_that_tensor_parallelism_does_not_divide() -> None:
    cfg = OmegaConf.create({"model": {"cfg": config(**ONE_OF_TWO)}, "train": {}})
    text = "nblocks=3 cannot be split over a tensor-parallel world size of 2"
    with pytest.raises(UserError, match=text):
        check_model(cfg, Layout(1, 2, 1))
    with pytest.raises(UserError, match=text):
        model_options.from_config(cfg.model.cfg, tensor_parallel_size=2)
