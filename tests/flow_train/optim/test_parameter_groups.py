"""Which parameters are decayed: the counts that the upstream models have, and the rules."""

from __future__ import annotations

import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import group_parameters
from monarch_flow.models import create_model


class Monarch(nn.Module):
    def __init__(self, blkdiag1: tuple[int, ...], blkdiag2: tuple[int, ...], out: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(flow.zeros(out))
        self.blkdiag1 = nn.Parameter(flow.zeros(*blkdiag1))
        self.blkdiag2 = nn.Parameter(flow.zeros(*blkdiag2))


class Dense(nn.Module):
    """The parameters of a linear layer, without the cost of its initialization."""

    def __init__(self, inputs: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(flow.zeros(out, inputs))
        if bias:
            self.bias = nn.Parameter(flow.zeros(out))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, qkv_bias: bool, monarch: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.Module()
        self.attn.qkv = Dense(width, 3 * width, qkv_bias)
        self.attn.proj = Dense(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Module()
        if monarch:
            inner, outer = width // 4, hidden // 4
            self.mlp.fc1 = Monarch((4, inner, inner), (4, outer, inner), hidden)
            self.mlp.fc2 = Monarch((4, inner, outer), (4, inner, inner), width)
        else:
            self.mlp.fc1, self.mlp.fc2 = Dense(width, hidden), Dense(hidden, width)


class Vit(nn.Module):
    """The parameters of a ViT/16 with 1,000 classes, by name and shape."""

    def __init__(
        self, width: int, depth: int, hidden: int, qkv_bias: bool = False, monarch: bool = False
    ) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(flow.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(flow.zeros(1, 197, width))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(
            *[Block(width, hidden, qkv_bias, monarch) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = Dense(width, 1000)


# monarch_spec.md 4.5: tensors and elements of the decayed group, then of the other.
COUNTS = [
    ((768, 8, 2304), {}, (34, 48_543_744), (62, 210_664)),
    ((768, 8, 2304), {"monarch": True}, (50, 29_669_376), (62, 210_664)),
    ((768, 12, 3072), {"qkv_bias": True}, (50, 86_292_480), (102, 275_176)),
]


@pytest.mark.parametrize(("shape", "options", "decayed", "other"), COUNTS)
def test_counts_are_those_of_the_upstream_models(shape, options, decayed, other):
    groups = group_parameters(Vit(*shape, **options))
    assert [group.decayed for group in groups] == [True, False]
    assert [(len(group.names), group.elements) for group in groups] == [decayed, other]
    for group in groups:
        assert list(group.names) == sorted(group.names)


MONARCH = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
MONARCH_MLP = {
    "_target_": "monarch_flow.layers.MlpCustom",
    "linear1_cfg": MONARCH,
    "linear2_cfg": MONARCH,
}


@pytest.mark.parametrize(
    ("name", "decayed", "other"),
    [
        ("vit_small_patch16_224", (50, 29_669_376), (62, 210_664)),
        ("mixer_b16_224", (74, 20_858_880), (100, 93_208)),
    ],
)
def test_counts_of_our_models(name, decayed, other):
    groups = group_parameters(create_model(name, mlp_cfg=MONARCH_MLP))
    assert [(len(group.names), group.elements) for group in groups] == [decayed, other]


def test_each_rule_by_name():
    model = Vit(8, 1, 16, qkv_bias=True, monarch=True)
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
    assert {"embedding.weight", "dist_token", "relative_position_bias"} <= other
    assert {"batch_norm.weight", "batch_norm.bias", "blocks.0.norm1.weight"} <= other
    names = {name for name, _ in model.named_parameters()} - {"frozen"}
    assert decayed | other == names
    assert not decayed & other


def test_flags_of_modules():
    class Flagged(nn.Module):
        no_weight_decay = ("weight",)

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(flow.zeros(2))
            self.other = nn.Parameter(flow.zeros(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Flagged()
            self.linear = nn.Linear(2, 2, bias=False)

        def no_weight_decay(self) -> set[str]:
            return {"linear.weight"}

    decayed, other = group_parameters(Model())
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


def test_nothing_to_train_is_an_error():
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        group_parameters(model)
