"""Which parameters are decayed: the counts that the upstream models have, and the rules."""

from __future__ import annotations

import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import group_parameters
from monarch_flow.models import create_model

# monarch_spec.md 4.5: tensors and elements of the decayed group, then of the other.


MONARCH = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
MONARCH_MLP = {
    "_target_": "monarch_flow.layers.MlpCustom",
    "linear1_cfg": MONARCH,
    "linear2_cfg": MONARCH,
}


# monarch_spec.md 4.5: tensors and elements of the decayed group, then of the other.
@pytest.mark.parametrize(
    ("name", "mlp", "decayed", "other"),
    [
        ("vit_small_patch16_224", None, (34, 48_543_744), (62, 210_664)),
        ("vit_small_patch16_224", MONARCH_MLP, (50, 29_669_376), (62, 210_664)),
        ("mixer_b16_224", MONARCH_MLP, (74, 20_858_880), (100, 93_208)),
    ],
)
def test_counts_are_those_of_the_upstream_models(name, mlp, decayed, other):
    groups = group_parameters(create_model(name, mlp_cfg=mlp))
    assert [group.decayed for group in groups] == [True, False]
    assert [(len(group.names), group.elements) for group in groups] == [decayed, other]
    for group in groups:
        assert list(group.names) == sorted(group.names)


def test_each_rule_by_name():
    sizes = {"embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = create_model("vit_small_patch16_224", mlp_cfg=MONARCH_MLP, **sizes)
    model.embedding = nn.Embedding(3, 8)
    model.dist_token = nn.Parameter(flow.zeros(1, 1, 8))
    model.relative_position_bias = nn.Parameter(flow.zeros(4))
    model.batch_norm = nn.BatchNorm2d(4)
    model.frozen = nn.Parameter(flow.zeros(2), requires_grad=False)
    decayed, other = (set(group.names) for group in group_parameters(model))
    assert decayed == {
        "blocks.0.attn.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.mlp.fc1.blkdiag1",
        "blocks.0.mlp.fc1.blkdiag2",
        "blocks.0.mlp.fc2.blkdiag1",
        "blocks.0.mlp.fc2.blkdiag2",
        "head.weight",
        "patch_embed.proj.weight",
    }
    names = {name for name, _ in model.named_parameters()} - {"frozen"}
    assert other == names - decayed


def test_flags_of_modules():
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.weight = nn.Parameter(flow.zeros(2))
    model.layer.other = nn.Parameter(flow.zeros(2))
    model.layer.no_weight_decay = ("weight",)
    model.linear = nn.Linear(2, 2, bias=False)
    model.no_weight_decay = lambda: {"linear.weight"}
    decayed, other = group_parameters(model)
    assert decayed.names == ("layer.other",)
    assert other.names == ("layer.weight", "linear.weight")


def test_switches():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    (everything,) = group_parameters(model, bias_weight_decay=True, normalization_weight_decay=True)
    assert everything.decayed
    assert everything.names == ("0.bias", "0.weight", "1.bias", "1.weight")
    decayed, other = group_parameters(model, normalization_weight_decay=True)
    assert decayed.names == ("0.weight", "1.weight")
    decayed, other = group_parameters(model, bias_weight_decay=True)
    assert decayed.names == ("0.bias", "0.weight")
    assert other.names == ("1.bias", "1.weight")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        group_parameters(model)
