"""replace_linears on models that are not ours."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from flowvision.models.vision_transformer import VisionTransformer
from oneflow import nn

from monarch_flow.layers import LowRank, MonarchLinear, replace_linears


def small_vit() -> nn.Module:
    return VisionTransformer(
        img_size=32, patch_size=16, embed_dim=64, depth=2, num_heads=4, num_classes=10
    )


def test_mlps_of_a_vision_transformer() -> None:
    model = small_vit()
    replaced = replace_linears(model, "monarch", include=r"mlp\.fc[12]$")
    assert replaced == [f"blocks.{block}.mlp.fc{fc}" for block in (0, 1) for fc in (1, 2)]
    assert isinstance(model.blocks[1].mlp.fc1, MonarchLinear)
    assert type(model.blocks[1].attn.qkv) is nn.Linear
    scores = model(flow.randn(2, 3, 32, 32))
    assert scores.shape == (2, 10)
    scores.sum().backward()
    assert np.abs(model.blocks[0].mlp.fc1.blkdiag1.grad.numpy()).max() > 0


def test_all_but_the_head() -> None:
    model = small_vit()
    replaced = replace_linears(model, {"_target_": "low_rank", "rank": 4}, exclude="head")
    assert len(replaced) == 8
    assert isinstance(model.blocks[0].attn.qkv, LowRank)
    assert type(model.head) is nn.Linear


def test_a_new_layer_is_like_the_old_one() -> None:
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 4)).double()
    model.eval()
    assert replace_linears(model) == ["0", "2"]
    assert model[0].bias is None
    assert model[2].bias is not None
    assert {p.dtype for p in model.parameters()} == {flow.float64}
    assert not model[0].training
    assert model(flow.zeros(1, 8, dtype=flow.float64)).shape == (1, 4)


def test_a_shared_layer_stays_shared() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Sequential(layer, nn.ReLU()))
    replace_linears(model)
    assert isinstance(model[0], MonarchLinear)
    assert model[0] is model[1][0]


def test_what_it_refuses() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(UserError, match=r"no nn.Linear has a name.*there are: 0"):
        replace_linears(model, include="mlp")
    with pytest.raises(UserError, match="is one"):
        replace_linears(nn.Linear(8, 8))
    with pytest.raises(UserError, match="not a regular expression"):
        replace_linears(model, include="(")
    with pytest.raises(UserError, match="did you mean"):
        replace_linears(model, "monark")
    assert type(model[0]) is nn.Linear
    placed = nn.Sequential(nn.Linear(8, 8)).to_global(
        flow.placement("cpu", [0]), flow.sbp.broadcast
    )
    with pytest.raises(UserError, match="before to_global"):
        replace_linears(placed)
