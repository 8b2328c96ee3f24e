"""Mlp and build_mlp: function, keys, the counts of the spec's table 3.8."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import LinearConfig, Mlp, MonarchLinear, build_mlp, dropout
from tests.tolerances import assert_close

# ViT-S without its MLPs, 8 blocks of 768 -> 2304 -> 768 (spec 4.4).
BLOCKS, REST = 8, 1_537_768 + 18_880_512


def butterfly(size: int, factors: int, block: int = 1) -> dict[str, Any]:
    return {
        "_target_": "BlockSparseLinear",
        "sparsity_config": {
            "_target_": "FlatBlockButterflySparsityConfig",
            "butterfly_size": size,
            "n_factors": factors,
            "block": block,
        },
        "backend": "dense",
    }


def windows(name: str, block: int, stripes: int, gtoken: int) -> dict[str, Any]:
    return {
        "_target_": "BlockSparseLinear",
        "sparsity_config": {
            "_target_": f"{name}SparsityConfig",
            "block": block,
            "window_size": block,
            "stripes": stripes,
            "step": 2,
            "gtoken": gtoken,
        },
    }


def masked(name: str) -> dict[str, Any]:
    pattern = windows(name, 16, 1, 16)["sparsity_config"]
    return {"_target_": "MaskedLinear", "sparsity_config": {**pattern, "block": 1}}


def with_low_rank(sparse: Any, rank: int) -> dict[str, Any]:
    return {"_target_": "SparseLRLinear", "sparse_cfg": sparse, "rank": rank}


# Table 3.8: all of ViT-S with this layer in both places.
TABLE = {
    "dense": (None, 48_754_408),
    "butterflyblockdiag": ("monarch", 29_880_040),
    "butterflyblockdiaglr": (with_low_rank("monarch", 64), 33_050_360),
    "fbbfly": (butterfly(16, 2, 32), 26_472_168),
    "fbbfly16-2": (butterfly(16, 2), 25_751_272),
    "fbbfly16-3": (butterfly(16, 3), 27_520_744),
    "fbbfly16-4": (butterfly(16, 4), 29_290_216),
    "fbbfly32-3": (butterfly(32, 3), 23_981_800),
    "fbbfly8-2": (butterfly(8, 2), 31_059_688),
    "fbbfly8-3": (butterfly(8, 3), 34_598_632),
    "fbbflylr": (with_low_rank(butterfly(16, 2, 32), 32), 28_069_624),
    "fbbflylr16-2": (with_low_rank(butterfly(16, 2), 32), 27_348_728),
    "fbbflylr16-3": (with_low_rank(butterfly(16, 3), 32), 29_118_200),
    "fbbflylr16-4": (with_low_rank(butterfly(16, 4), 32), 30_887_672),
    "fbbflylr32-3": (with_low_rank(butterfly(32, 3), 32), 25_579_256),
    "fbbflylr8-2": (with_low_rank(butterfly(8, 2), 32), 32_657_144),
    "fbbflylr8-3": (with_low_rank(butterfly(8, 3), 32), 36_196_088),
    "ninjaturtle": (windows("NinjaTurtle", 16, 1, 16), 22_941_416),
    "ninjaturtle32": (windows("NinjaTurtle", 32, 2, 64), 28_749_544),
    "ninjaturtlelr": (with_low_rank(windows("NinjaTurtle", 16, 1, 16), 32), 24_538_872),
    "ninjaturtlelr32": (with_low_rank(windows("NinjaTurtle", 32, 2, 64), 64), 31_919_864),
    "butterflyglobal": (windows("ButterflyGlobal", 16, 1, 16), 22_367_976),
    "ninjaturtle-slow": (masked("NinjaTurtle"), 48_754_408),
    "butterflyglobal-slow": (masked("ButterflyGlobal"), 48_754_408),
}


@pytest.mark.parametrize("name", TABLE)
def test_counts_of_vit_small(name: str) -> None:
    config, expected = TABLE[name]
    layers = LinearConfig.of(config)
    mlp = [layers.build(768, 2304), layers.build(2304, 768)]
    count = sum(p.numel() for layer in mlp for p in layer.parameters())
    assert REST + BLOCKS * count == expected


def test_the_paper_names_a_full_butterfly_of_small_size_dense() -> None:
    """All factors of a butterfly of 2 tiles are the whole matrix."""
    layer = LinearConfig.of(butterfly(2, 1)).build(32, 48)
    assert layer.weight.numel() == 32 * 48


@pytest.mark.parametrize("drop_btw_fcs", [True, False])
@pytest.mark.parametrize("kind", ["dense", "monarch"])
def test_function(kind: str, drop_btw_fcs: bool) -> None:
    """fc2(gelu(fc1 x)) in float64, with the exact GELU."""
    erf = pytest.importorskip("scipy.special").erf
    mlp = Mlp(10, 24, kind, kind, drop_btw_fcs=drop_btw_fcs, drop=0.5).eval()
    x = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)

    def applied(layer: nn.Module, x: np.ndarray) -> np.ndarray:
        weight = layer.weight if kind == "dense" else layer.dense()
        return x @ weight.numpy().astype(float).T + layer.bias.numpy()

    hidden = applied(mlp.fc1, x)
    expected = applied(mlp.fc2, hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))))
    assert_close(mlp(flow.tensor(x)).numpy(), expected, reduced=24)


def test_keys() -> None:
    dense = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert sorted(Mlp(8, 16).state_dict()) == dense
    assert sorted(Mlp(8, 16, drop=0.5).state_dict()) == dense
    mlp = build_mlp({"_target_": "MlpCustom", "linear1_cfg": "monarch"}, 8, 16)
    assert sorted(mlp.state_dict()) == ["fc1.bias", "fc1.blkdiag1", "fc1.blkdiag2", *dense[2:]]


def test_dropout_places() -> None:
    mlp = Mlp(8, 16, drop=0.25)
    assert (mlp.drop1.p, mlp.drop2.p) == (0.25, 0.25)
    mlp = Mlp(8, 16, drop=0.25, drop_btw_fcs=False)
    assert (type(mlp.drop1), mlp.drop2.p) == (nn.Identity, 0.25)
    with pytest.raises(UserError, match="between 0 and 1"):
        dropout(1.5)


def test_build_mlp() -> None:
    assert type(build_mlp(None, 8, 16).fc1) is nn.Linear
    assert isinstance(build_mlp("monarch", 8, 16).fc2, MonarchLinear)
    config = {
        "_target_": "src.models.layers.mlp.MlpCustom",
        "linear1_cfg": {"_target_": "monarch", "nblocks": 2},
        "linear2_cfg": {"_target_": "monarch", "nblocks": 2},
        "drop": 0.1,
    }
    mlp = build_mlp(config, 8, 16, drop=0.3)
    assert isinstance(mlp.fc2, MonarchLinear)
    assert (mlp.fc1.nblocks, mlp.fc2.in_features, mlp.fc2.out_features) == (2, 16, 8)
    # The model's rate goes before the config's.
    assert mlp.drop1.p == 0.3


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"_target_": "MlpCostum"}, "did you mean 'MlpCustom'"),
        ({"_target_": "MlpCustom", "linear_cfg": None}, "did you mean 'linear[12]_cfg'"),
        ({"_target_": "MlpCustom", "linear1_cfg": "monark"}, "did you mean 'monarch'"),
        (4, "mapping"),
        ("MlpCustom", "no linear layer"),
        ({"linear1_cfg": None}, "'_target_'"),
    ],
)
def test_wrong_configs(config: object, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_mlp(config, 8, 16)
