"""Every option of the groups of layers is built, with monarch_spec.md 3.8's, 4.4's parameters."""

from __future__ import annotations

import oneflow_accel

import pytest

from monarch_flow.config import COMPOSER, compose
from monarch_flow.convert import layer_rules, parse_arguments
from monarch_flow.layers import build_mlp

DENSE_VIT_S, DENSE_MLPS, BLOCKS = 48_754_408, 28_336_128, 8
# Parameters of ViT-S whose MLPs alone are replaced.
VIT_S = {
    "none": DENSE_VIT_S,
    "butterflyblockdiag": 29_880_040,
    "butterflyblockdiaglr": 33_050_360,
    "fbbfly": 26_472_168,
    "fbbfly16-2": 25_751_272,
    "fbbfly16-3": 27_520_744,
    "fbbfly16-4": 29_290_216,
    "fbbfly32-3": 23_981_800,
    "fbbfly8-2": 31_059_688,
    "fbbfly8-3": 34_598_632,
    "fbbflylr": 28_069_624,
    "fbbflylr16-2": 27_348_728,
    "fbbflylr16-3": 29_118_200,
    "fbbflylr16-4": 30_887_672,
    "fbbflylr32-3": 25_579_256,
    "fbbflylr8-2": 32_657_144,
    "fbbflylr8-3": 36_196_088,
    "ninjaturtle": 22_941_416,
    "ninjaturtle32": 28_749_544,
    "ninjaturtlelr": 24_538_872,
    "ninjaturtlelr32": 31_919_864,
    "butterflyglobal": 22_367_976,
    "ninjaturtle-slow": DENSE_VIT_S,
    "butterflyglobal-slow": DENSE_VIT_S,
    # Not in the specification: 1 / 4 of the weights, and the biases.
    "blockdiag": DENSE_VIT_S - DENSE_MLPS + BLOCKS * (768 * 2304 * 2 // 4 + 768 + 2304),
}
DENSE_MIXER_B, MIXER_BLOCKS, WIDTH, HIDDEN = 59_880_472, 12, 768, 3072
MIXER_B = {
    "none": DENSE_MIXER_B,
    "bflyblockdiag": 20_952_088,
    "blockdiag": 17_413_144,
    "blockdiagglobal": 19_624_984,
    "blockdiaglr": 20_408_368,
    "fbbfly": 15_053_848,
    "fbbflylr": 18_049_072,
}


@pytest.fixture(scope="module", autouse=True)
def _device():
    oneflow_accel.select_device()


def parameters(*layers):
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def test_there_is_a_number_for_every_option():
    groups = COMPOSER.groups()
    assert set(groups.options("model/vitmlp_cfg")) == set(VIT_S)
    assert set(groups.options("model/channel_mlp_cfg")) == set(MIXER_B)


@pytest.mark.parametrize("option", VIT_S)
def test_mlps_of_a_vit(option):
    """As `convert --config` reads them, which takes a hundredth of the time of composing."""
    if option == "none":
        layers = build_mlp(compose(["experiment=imagenet/vit/vit-s"]).model.mlp_cfg, 768, 2304)
        layers = [layers.fc1, layers.fc2]
    else:
        rules = layer_rules(parse_arguments(["project", "in", "out", "--config", option]))
        sizes = ((768, 2304), (2304, 768))
        layers = [
            rule[1].build(*size) for rule, size in zip((rules[0], rules[-1]), sizes, strict=True)
        ]
    assert DENSE_VIT_S - DENSE_MLPS + BLOCKS * parameters(*layers) == VIT_S[option]


@pytest.mark.parametrize("option", MIXER_B)
def test_mlps_of_a_mixer(option):
    overrides = ["experiment=imagenet/mixer/mixerb-cutmix", f"model/channel_mlp_cfg={option}"]
    dense = MIXER_BLOCKS * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    mlp = build_mlp(compose(overrides).model.mlp_cfg, WIDTH, HIDDEN)
    total = DENSE_MIXER_B - dense + MIXER_BLOCKS * parameters(mlp)
    assert total == MIXER_B[option]
