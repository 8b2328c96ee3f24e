"""Names, sizes, costs and initial values of the models, and what they say to wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.metrics.macs import count_macs, count_parameters, macs_by_module
from flow_train.optim import group_parameters
from monarch_flow.layers import MonarchLinear
from monarch_flow.models import create_model, default_config, list_models
from tests.monarch_flow.models.structured_configs import MODELS, MONARCH, mlp

ARCHITECTURES = {"vit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224"}


def _one_block(name: str, **arguments: Any) -> tuple[nn.Module, int]:
    """The model with one block, and how many it has: all of a model's blocks have one size."""
    return create_model(name, depth=1, **arguments), default_config(name)["depth"]


def _trainable(model: nn.Module, depth: int) -> int:
    return (
        count_parameters(model).trainable
        + (depth - 1) * count_parameters(model.blocks[0]).trainable
    )


def _macs(model: nn.Module, depth: int) -> int:
    modules = macs_by_module(model, 224)
    block = sum(module.macs for module in modules if module.name.startswith("blocks.0."))
    return sum(module.macs for module in modules) + (depth - 1) * block


@pytest.fixture
def _without_init(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("vit.init_transformer", "t2t_vit.init_transformer", "mixer.init_mixer"):
        monkeypatch.setattr(f"monarch_flow.models.{place}", lambda model: None)


@pytest.mark.usefixtures("_without_init")
@pytest.mark.parametrize("case", list(MODELS))
def test_models_have_the_published_parameters_and_macs(case: str) -> None:
    name, layer, attention, parameters, giga_macs = MODELS[case]
    arguments = {} if attention is None else {"attnlinear_cfg": attention}
    model, depth = _one_block(name, mlp_cfg=layer and mlp(layer), **arguments)
    assert _trainable(model, depth) == parameters
    if giga_macs is not None:
        assert round(_macs(model, depth) / 1e9, 3) == giga_macs


def test_monarch_vit_s_has_the_released_names_and_shapes() -> None:
    model = create_model("vit_small_patch16_224", mlp_cfg=mlp(MONARCH))
    expected = {
        "cls_token": (1, 1, 768),
        "pos_embed": (1, 197, 768),
        "patch_embed.proj.weight": (768, 3, 16, 16),
        "patch_embed.proj.bias": (768,),
    }
    for index in range(8):
        block = {
            "norm1.weight": (768,),
            "norm1.bias": (768,),
            "attn.qkv.weight": (2304, 768),
            "attn.proj.weight": (768, 768),
            "attn.proj.bias": (768,),
            "norm2.weight": (768,),
            "norm2.bias": (768,),
            "mlp.fc1.bias": (2304,),
            "mlp.fc1.blkdiag1": (4, 192, 192),
            "mlp.fc1.blkdiag2": (4, 576, 192),
            "mlp.fc2.bias": (768,),
            "mlp.fc2.blkdiag1": (4, 192, 576),
            "mlp.fc2.blkdiag2": (4, 192, 192),
        }
        expected |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    expected |= {"norm.weight": (768,), "norm.bias": (768,)}
    expected |= {"head.weight": (1000, 768), "head.bias": (1000,)}
    assert [(n, tuple(v.shape)) for n, v in model.state_dict().items()] == list(expected.items())
    assert len(expected) == 112
    assert count_parameters(model) == (29_880_040, 29_880_040)
    groups = [(len(group.names), group.elements) for group in group_parameters(model)]
    assert groups == [(50, 29_669_376), (62, 210_664)]
    _check_monarch_vit_s_start(model)


def _check_monarch_vit_s_start(model: nn.Module) -> None:
    """Dense weights N(0, 0.02^2) and biases 0; Monarch as its constructor leaves it."""
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    for name in ("pos_embed", "head.weight", "blocks.3.attn.qkv.weight"):
        assert abs(arrays[name].std() / 0.02 - 1) < 0.01, name
        assert abs(arrays[name].mean()) < 2e-4
    assert abs(arrays["cls_token"].std() / 0.02 - 1) < 0.2
    for name in ("head.bias", "norm.bias", "blocks.3.attn.proj.bias", "blocks.0.norm1.bias"):
        assert not arrays[name].any(), name
    assert (arrays["blocks.7.norm2.weight"] == 1).all()
    for name in ("patch_embed.proj.weight", "patch_embed.proj.bias"):
        assert 0.99 < np.abs(arrays[name]).max() * math.sqrt(3 * 256) <= 1.0001, name
    measured = {"fc1.blkdiag1": 0.0417, "fc1.blkdiag2": 0.0417, "fc1.bias": 0.0120}
    measured |= {"fc2.blkdiag1": 0.0241, "fc2.blkdiag2": 0.0417, "fc2.bias": 0.0208}
    for name, std in measured.items():
        assert abs(arrays[f"blocks.5.mlp.{name}"].std() / std - 1) < 0.06, name


def test_mixer_starts_as_its_paper_says() -> None:
    model = create_model("mixer_s16_224", depth=1, mlp_cfg=mlp(MONARCH))
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    assert not arrays["head.weight"].any()
    assert not arrays["head.bias"].any()
    assert not arrays["stem.proj.bias"].any()
    assert abs(arrays["stem.proj.weight"].std() * math.sqrt(3 * 256) - 1) < 0.02
    bound = math.sqrt(6 / (196 + 256))
    assert 0.99 * bound < np.abs(arrays["blocks.0.mlp_tokens.fc1.weight"]).max() <= bound * 1.0001
    assert 1e-7 < arrays["blocks.0.mlp_tokens.fc2.bias"].std() < 1e-5
    # Monarch keeps its own.
    factor = arrays["blocks.0.mlp_channels.fc1.blkdiag1"]
    assert abs(factor.std() * math.sqrt(3 * 128) - 1) < 0.02
    assert arrays["blocks.0.mlp_channels.fc1.bias"].std() > 0.01


@pytest.mark.parametrize(("name", "keys"), [("t2t_vit_7", 111), ("t2t_vit_t_14", 184)])
def test_t2t_has_the_converted_checkpoints_layout(name: str, keys: int) -> None:
    model = create_model(name)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert len(shapes) == keys
    dim = default_config(name)["embed_dim"]
    assert shapes["pos_embed.pe"] == (1, 197, dim)
    assert "pos_embed.pe" in dict(model.named_buffers())
    assert shapes["patch_embed.project.weight"] == (dim, 576)
    assert not [key for key in shapes if key.startswith("blocks") and key.endswith("qkv.bias")]
    parameters = count_parameters(model)
    if name == "t2t_vit_7":
        assert shapes["patch_embed.attention1.kqv.weight"] == (192, 147)
        # The random features are saved and not trained.
        assert parameters.not_trainable == 2 * 32 * 64
        w = model.patch_embed.attention2.w.numpy().astype(np.float64)
        np.testing.assert_allclose(w @ w.T, 32 * np.eye(32), atol=1e-4)
    else:
        attention = "patch_embed.attention2"
        assert shapes[f"{attention}.attn.qkv.weight"] == (192, 576)
        assert [key.removeprefix(f"{attention}.") for key in shapes if attention in key] == [
            *("norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.proj.weight"),
            *("attn.proj.bias", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias"),
            *("mlp.fc2.weight", "mlp.fc2.bias"),
        ]
        assert parameters == (21_465_422, 21_465_422)


TINY: dict[str, Mapping[str, Any]] = {
    "vit_small_patch16_224": {"embed_dim": 32, "num_heads": 4, "depth": 2},
    "mixer_b16_224": {"embed_dim": 32, "depth": 2},
    "t2t_vit_7": {"embed_dim": 32, "num_heads": 4, "depth": 2},
    "t2t_vit_t_14": {"embed_dim": 32, "num_heads": 4, "depth": 2},
}


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("config", [None, "low_rank"])
def test_other_image_sizes_channels_and_classes(name: str, config: str | None) -> None:
    arguments = {**TINY[name], "img_size": (32, 48), "in_chans": 1, "num_classes": 3}
    model = create_model(name, mlp_cfg=config, **arguments)
    images = flow.randn(2, 1, 32, 48)
    assert tuple(model.features(images).shape) == (2, 32)
    logits = model(images)
    assert tuple(logits.shape) == (2, 3)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match=r"\(N, 1, 32, 48\)"):
        model(flow.randn(2, 3, 32, 48))
    assert count_macs(model, (32, 48)) > 0


def test_small_models_for_a_cpu() -> None:
    model = create_model("vit_tiny_patch4_28", embed_dim=64, depth=2, mlp_cfg="monarch")
    assert tuple(model(flow.randn(2, 1, 28, 28)).shape) == (2, 10)
    assert isinstance(model.blocks[1].mlp.fc2, MonarchLinear)
    assert tuple(create_model("vit_tiny_patch8_64")(flow.randn(1, 3, 64, 64)).shape) == (1, 5)
    assert {"vit_tiny_patch4_28", "t2t_vit_t_14", "mixer_s16_224"} | ARCHITECTURES <= set(
        list_models()
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit_smal_patch16_224", {}, "vit_small_patch16_224"),
        ("vit_tiny_patch4_28", {"embed_dims": 64}, "embed_dim"),
        ("mixer_s16_224", {"attnlinear_cfg": "monarch"}, "attnlinear_cfg"),
        ("vit_tiny_patch4_28", {"num_heads": 3}, "3 heads do not divide a width of 128"),
        ("vit_tiny_patch4_28", {"patch_size": 5}, "img_size as a multiple of patch_size"),
        ("vit_tiny_patch4_28", {"img_size": 0}, "img_size"),
        ("vit_tiny_patch4_28", {"attnlinear_cfg": {"_target_": "os.system"}}, "os.system"),
        ("t2t_vit_7", {"tokens_type": "convolution"}, "transformer, performer"),
        ("t2t_vit_7", {"img_size": (2, 3)}, r"an image of \(2, 3\) splits into no token"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model(name, **arguments)
