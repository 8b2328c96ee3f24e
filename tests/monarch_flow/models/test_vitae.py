"""Names, sizes, costs and initial values of ViTAE, and what it says to wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.metrics.macs import count_parameters, macs_by_module
from flow_train.optim import group_parameters
from monarch_flow.layers import replace_linears
from monarch_flow.models import create_model, default_config, list_models

# Trainable parameters by what is replaced, and those that are not trained: ../shared/docs/
# vitae_spec.md, sections 1.1 and 2.2, where they were counted on the published code.
DENSE, MLP, ATTENTION, BOTH = "dense", "MLP", "attention", "both"
PARAMETERS = {
    ("ViTAE_basic_Tiny", DENSE): (4_882_792, 4_096),
    ("ViTAE_basic_Tiny", MLP): (3_735_912, 4_096),
    ("ViTAE_basic_Tiny", ATTENTION): (3_735_912, 4_096),
    ("ViTAE_basic_Tiny", BOTH): (2_589_032, 4_096),
    ("ViTAE_basic_6M", DENSE): (6_610_024, 4_096),
    ("ViTAE_basic_6M", MLP): (4_971_624, 4_096),
    ("ViTAE_basic_13M", DENSE): (10_830_632, 4_096),
    ("ViTAE_basic_13M", MLP): (8_014_632, 4_096),
    ("ViTAE_basic_Small", DENSE): (24_009_096, 23_040),
    ("ViTAE_basic_Small", MLP): (15_751_560, 23_040),
    ("ViTAE_basic_Small", ATTENTION): (18_848_136, 23_040),
    ("ViTAE_basic_Small", BOTH): (10_590_600, 23_040),
    ("ViTAE_basic_Base", DENSE): (89_341_672, 0),
    ("ViTAE_basic_Large", DENSE): (311_724_008, 0),
    ("ViTAE_basic_Huge", DENSE): (644_528_360, 0),
}
# 10^9 multiply-accumulates of an image of 224 x 224, section 5.
GIGA_MACS = {
    ("ViTAE_basic_Tiny", DENSE): 1.76,
    ("ViTAE_basic_Tiny", MLP): 1.53,
    ("ViTAE_basic_6M", DENSE): 2.15,
    ("ViTAE_basic_13M", DENSE): 3.04,
    ("ViTAE_basic_Small", DENSE): 6.18,
    ("ViTAE_basic_Small", MLP): 4.56,
}
NARROW: dict[str, Any] = {
    "embed_dims": [4, 4, 8],
    "token_dims": [4, 8, 16],
    "depth": 2,
    "num_heads": 2,
    "conv_groups": 4,
    "num_classes": 3,
    "img_size": 32,
}
NARROW_PATCH: dict[str, Any] = {
    "embed_dim": 16,
    "patch_size": 8,
    "depth": 2,
    "num_heads": 2,
    "conv_groups": 4,
    "num_classes": 3,
    "img_size": 32,
}


@pytest.fixture
def _without_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_flow.models.vitae.init_transformer", lambda model: None)


def _one_cell(name: str, replaced: str) -> tuple[nn.Module, int]:
    """The model with one normal cell, and how many it has: all have one size."""
    mlp_cfg = "monarch" if replaced in (MLP, BOTH) else None
    model = create_model(name, depth=1, mlp_cfg=mlp_cfg)
    if replaced in (ATTENTION, BOTH):
        names = replace_linears(model, "monarch", include=r"NC\.\d+\.attn\.(qkv|proj)$")
        assert names == ["layers.2.NC.0.attn.qkv", "layers.2.NC.0.attn.proj"]
    return model, default_config(name)["depth"]


@pytest.mark.usefixtures("_without_init")
@pytest.mark.parametrize("case", list(PARAMETERS), ids=" ".join)
def test_each_model_has_the_published_parameters_and_costs(case: tuple[str, str]) -> None:
    model, depth = _one_cell(*case)
    assert default_config(case[0])["img_size"] == 224
    one, cell = count_parameters(model), count_parameters(model.layers[2].NC[0])
    assert cell.not_trainable == 0
    counted = (one.trainable + (depth - 1) * cell.trainable, one.not_trainable)
    assert counted == PARAMETERS[case]
    if case in GIGA_MACS:
        modules = macs_by_module(model, 224)
        in_cell = sum(item.macs for item in modules if item.name.startswith("layers.2.NC.0."))
        whole = sum(item.macs for item in modules) + (depth - 1) * in_cell
        assert round(whole / 1e9, 2) == GIGA_MACS[case]


@pytest.mark.usefixtures("_without_init")
@pytest.mark.parametrize("name", ["ViTAE_basic_Tiny", "ViTAE_basic_Base"])
def test_what_is_trained_and_what_decays(name: str) -> None:
    """Names and shapes: test_vitae_golden.py and test_vitae_official.py."""
    model = create_model(name, depth=1, mlp_cfg="monarch")
    state = model.state_dict()
    counters = {key for key in state if key.endswith("num_batches_tracked")}
    assert {key for key, value in state.items() if value.dtype == flow.int64} == counters
    frozen = {key for key, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {key for key in state if key.endswith(".attn.w")}
    trained = {name for group in group_parameters(model) for name in group.names}
    assert not trained & frozen
    decayed = group_parameters(model)[0]
    assert decayed.decayed
    # Factors of Monarch layers and kernels of convolutions among them.
    ends = (".bias", "norm1.weight", "norm2.weight", "fc_norm.weight", "cls_token", "pos_embed")
    ends += ("PCM.1.weight", "PCM.4.weight", "RC.PCM.3.weight", "attn.w")
    parameters = dict(model.named_parameters())
    assert set(decayed.names) == {key for key in parameters if not key.endswith(ends)}


def test_values_start_as_the_specification_says() -> None:
    model = create_model("ViTAE_basic_Tiny", mlp_cfg="monarch")
    arrays = {key: value.numpy() for key, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            weight = arrays[f"{name}.weight"]
            assert abs(weight.std() / 0.02 - 1) < 0.05, name
            assert abs(weight.mean()) < 1e-3, name
            assert not arrays[f"{name}.bias"].any(), name
        elif isinstance(module, nn.Conv2d):
            fan_in = math.prod(module.weight.shape[1:])
            for key in ("weight", "bias"):
                largest = np.abs(arrays[f"{name}.{key}"]).max() * math.sqrt(fan_in)
                assert 0.9 < largest <= 1.0001, (name, key)
        elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            assert (arrays[f"{name}.weight"] == 1).all()
            assert not arrays[f"{name}.bias"].any()
        if isinstance(module, nn.LayerNorm):
            # The performers' have the framework's own.
            assert module.eps == (1e-5 if ".RC." in name else 1e-6), name
        if isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum) == (1e-5, 0.1)
            assert (arrays[f"{name}.running_var"] == 1).all()
    for stage in (0, 1):
        w = arrays[f"layers.{stage}.RC.attn.w"].astype(np.float64)
        np.testing.assert_allclose(w @ w.T, 32 * np.eye(32), atol=1e-4)
    bounds = {"fc1.blkdiag1": 0.125, "fc1.blkdiag2": 0.125, "fc1.bias": 0.0442}
    bounds |= {"fc2.blkdiag1": 0.0884, "fc2.blkdiag2": 0.125, "fc2.bias": 0.0625}
    for name, bound in bounds.items():
        largest = np.abs(arrays[f"layers.2.NC.3.mlp.{name}"]).max()
        assert 0.97 * bound < largest < 1.001 * bound, name


def test_tokens_of_the_patch_models_start_at_zero() -> None:
    model = create_model("ViTAE_basic_Base", **NARROW_PATCH)
    for name in ("cls_token", "pos_embed"):
        value = getattr(model.layers[0].RC, name)
        assert value.requires_grad
        assert not value.numpy().any()


@pytest.mark.parametrize("side", [96, 31, 3])
def test_any_square_size_with_one_model(side: int) -> None:
    model = create_model("ViTAE_basic_Tiny", **{**NARROW, "in_chans": 1}).eval()
    images = flow.randn(2, 1, side, side)
    assert tuple(model.features(images).shape) == (2, 16)
    assert tuple(model(images).shape) == (2, 3)
    # Built for that size it is the same function.
    other = create_model("ViTAE_basic_Tiny", **{**NARROW, "in_chans": 1, "img_size": side}).eval()
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(other(images).numpy(), model(images).numpy())


def test_images_that_are_not_square() -> None:
    """Only convolutions know places: transpose the image and all kernels, and features stay."""
    model = create_model("ViTAE_basic_Tiny", **NARROW).eval()
    images = flow.randn(2, 3, 32, 64)
    features = model.features(images).numpy()
    transposed = {
        key: value.transpose(2, 3).contiguous() if value.ndim == 4 else value
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(transposed)
    turned = model.features(images.transpose(2, 3).contiguous()).numpy()
    np.testing.assert_allclose(turned, features, rtol=1e-4, atol=1e-5)
    # And the kernels are not symmetric.
    assert np.abs(model.features(images).numpy() - features).max() > 1e-3
    with pytest.raises(UserError, match="30 x 32"):
        model(flow.randn(1, 3, 30, 32))


def test_a_patch_model_takes_one_size() -> None:
    model = create_model("ViTAE_basic_Base", **{**NARROW_PATCH, "img_size": [32, 16]}).eval()
    assert tuple(model(flow.randn(2, 3, 32, 16)).shape) == (2, 3)
    assert tuple(model.features(flow.randn(2, 3, 32, 16)).shape) == (2, 16)
    with pytest.raises(ValueError, match=r"\(N, 3, 32, 16\)"):
        model(flow.randn(2, 3, 32, 32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"conv_groups": 3}, "conv_groups=3 does not divide the 16 channels"),
        ({"num_heads": 3}, "3 heads do not divide a width of 16"),
        ({"token_dims": [4, 8, 24]}, "must be twice the third of embed_dims"),
        ({"embed_dims": [4, 8]}, "three widths"),
        ({"token_dims": [4, 0, 16]}, "each of token_dims is 0"),
        ({"img_size": 30}, "30 x 30 cannot be reduced 4 times each way: choose a multiple of 4"),
        ({"embed_dim": 16}, "embed_dims"),
    ],
)
def test_wrong_arguments_are_named(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model("ViTAE_basic_Tiny", **{**NARROW, **arguments})


def test_wrong_names_and_images_are_named() -> None:
    assert {name for name, _ in PARAMETERS} <= set(list_models())
    for typed, meant in {
        "vitae_tiny": "ViTAE_basic_Tiny",
        "vitae_small": "ViTAE_basic_Small",
        "ViTAE_basic_13m": "ViTAE_basic_13M",
    }.items():
        with pytest.raises(UserError, match=f"did you mean '{meant}'"):
            create_model(typed)
    model = create_model("ViTAE_basic_Tiny", **NARROW)
    with pytest.raises(UserError, match="2 x 2 cannot be reduced"):
        model(flow.randn(1, 3, 2, 2))
    for shape in [(1, 1, 32, 32), (3, 32, 32), (2,)]:
        with pytest.raises(ValueError, match="do not fit a model"):
            model(flow.randn(*shape))


def test_rates_of_stochastic_depth_rise_to_the_last_cell() -> None:
    model = create_model("ViTAE_basic_Tiny", **{**NARROW, "depth": 7}, drop_path_rate=0.1)
    rates = [
        [
            getattr(branch, "p", 0.0)
            for branch in (cell.drop_path_local, cell.drop_path1, cell.drop_path2)
        ]
        for cell in model.layers[2].NC
    ]
    np.testing.assert_allclose(rates, np.arange(7)[:, None].repeat(3, axis=1) / 60)
    assert isinstance(model.layers[2].NC[0].drop_path1, nn.Identity)
