"""LinearConfig: what it reads, what it builds, what it refuses."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest
from omegaconf import OmegaConf
from oneflow import nn

from monarch_flow.layers import (
    BlockdiagLinear,
    BlockSparseLinear,
    ButterflyLinear,
    KaleidoscopeLinear,
    LinearConfig,
    LowRank,
    MonarchLinear,
    SparseLRLinear,
)
from monarch_flow.layers.config import register_linear

MONARCH = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 8}
PIXELFLY = """
_target_: src.models.layers.fastlinear.SparseLRLinear
rank: 4
sparse_cfg:
  _target_: src.models.layers.blocksparse_linear.BlockSparseLinear
  sparsity_config:
    _target_: src.models.layers.fastlinear.FlatBlockButterflySparsityConfig
    butterfly_size: 4
    n_factors: 2
    block: 8
  backend: dense
"""


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("dense", nn.Linear),
        ("monarch", MonarchLinear),
        ("blockdiag", BlockdiagLinear),
        ("low_rank", LowRank),
        ("fbbfly", BlockSparseLinear),
        ("pixelfly", SparseLRLinear),
        ("butterfly", ButterflyLinear),
        ("kaleidoscope", KaleidoscopeLinear),
    ],
)
def test_short_names(name: str, cls: type) -> None:
    config = LinearConfig.of(name)
    layer = config.build(64, 128)
    assert type(layer) is cls
    assert (layer.in_features, layer.out_features) == (64, 128)
    assert layer.bias is not None
    assert config.build(64, 128, bias=False).bias is None
    assert LinearConfig.of(config.to_dict()) == config
    assert config.is_dense == (name == "dense")


@pytest.mark.parametrize("value", [None, {"_target_": "torch.nn.Linear"}, "linear"])
def test_dense_is_the_default(value: object) -> None:
    assert LinearConfig.of(value) == LinearConfig()
    assert type(LinearConfig.of(value).build(3, 4)) is nn.Linear


@pytest.mark.parametrize(
    "target",
    [
        "monarch",
        "MonarchLinear",
        "monarch_flow.layers.MonarchLinear",
        "src.models.modules.layers.monarch_linear.MonarchLinear",
    ],
)
def test_ways_to_name_a_class(target: str) -> None:
    assert LinearConfig.of({"_target_": target, "nblocks": 8}) == LinearConfig.of(MONARCH)


def test_equal_by_value_with_defaults() -> None:
    assert LinearConfig.of("monarch") == LinearConfig.of({"_target_": "monarch", "nblocks": 4})
    assert len({LinearConfig.of(MONARCH), LinearConfig.of(MONARCH), LinearConfig.of(None)}) == 2
    assert LinearConfig.of(MONARCH).to_dict() == MONARCH


def test_a_composed_config() -> None:
    """OmegaConf's containers, upstream's names, nested layers."""
    config = LinearConfig.of(OmegaConf.create(PIXELFLY))
    layer = config.build(32, 64)
    assert isinstance(layer, SparseLRLinear)
    assert isinstance(layer.sparse, BlockSparseLinear)
    assert layer.low_rank.rank == 4
    assert tuple(layer.sparse.weight.shape) == (24, 8, 8)
    assert LinearConfig.of(config.to_dict()) == config
    assert hash(LinearConfig.of(config.to_dict())) == hash(config)
    assert isinstance(config.to_dict()["sparse_cfg"]["sparsity_config"], dict)


def test_a_bias_of_the_config_goes_first() -> None:
    config = LinearConfig.of({**MONARCH, "bias": False})
    assert config.build(8, 8, bias=True).bias is None
    assert config.to_dict() == {**MONARCH, "bias": False}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"_target_": "MonarchLiner"}, "did you mean 'MonarchLinear'"),
        ({"_target_": "monarch", "nblock": 8}, "no option 'nblock'; did you mean 'nblocks'"),
        ({"_target_": "os.system", "command": "true"}, "not a linear layer of this package"),
        ({"_target_": "monarch", "nblocks": [4]}, r"cannot be \[4\]"),
        ({"_target_": "monarch", "in_features": 8}, "no option 'in_features'"),
        ({"_target_": "SparseLRLinear"}, "needs the option 'sparse_cfg'"),
        ({"nblocks": 4}, "names a class; it has: nblocks"),
        (4, "not a linear layer"),
        ({"_target_": "pixelfly", "sparse_cfg": "fbfly"}, "did you mean 'fbbfly'"),
        ({"_target_": "blockdiag", "shuffle": "no"}, "'shuffle' of BlockdiagLinear is 'no'"),
    ],
)
def test_what_it_refuses(value: object, text: str) -> None:
    with pytest.raises(UserError, match=text):
        LinearConfig.of(value)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        register_linear("monarch")(type("Other", (MonarchLinear,), {}))
