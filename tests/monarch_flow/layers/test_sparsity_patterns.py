"""Layouts of block sparsity: figures of the spec, definitions entry by entry, errors."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import pytest

from monarch_flow.layers.block_sparse import (
    BlockdiagSparsityConfig,
    ButterflyGlobalSparsityConfig,
    FlatBlockButterflySparsityConfig,
    NinjaTurtleSparsityConfig,
    SparsityConfig,
)


def test_coarsened_butterfly() -> None:
    """768 -> 2304: 368 of 1,728 blocks of 32, 0.2130; without blocks the nominal 0.1875."""
    config = FlatBlockButterflySparsityConfig(butterfly_size=16, n_factors=2, block=32)
    layout = config.layout(2304, 768)
    assert (layout.shape, layout.sum()) == ((72, 24), 368)
    fine = FlatBlockButterflySparsityConfig(butterfly_size=16, n_factors=2, block=1)
    assert fine.layout(2304, 768).mean() == 0.1875


def test_coarsened_block_diagonal() -> None:
    """768 -> 3072: 666 of 2,304 blocks."""
    config = BlockdiagSparsityConfig(nblocks=4, block=32, global_size=32)
    layout = config.layout(3072, 768)
    assert (layout.size, layout.sum()) == (2304, 666)


@pytest.mark.parametrize("n_factors", [1, 2, 3])
def test_butterfly_entry_by_entry(n_factors: int) -> None:
    config = FlatBlockButterflySparsityConfig(butterfly_size=8, n_factors=n_factors, block=1)
    layout = config.layout(16, 24)
    for row in range(16):
        for column in range(24):
            apart = (row // 2) ^ (column // 3)
            assert layout[row, column] == (apart in [0, *(2**i for i in range(n_factors))])
    assert layout.mean() == (1 + n_factors) / 8


def test_shuffled_butterfly() -> None:
    """Column c 4 + g of the tiles holds column g 2 + c, for 4 groups of 8 tiles."""
    plain = FlatBlockButterflySparsityConfig(butterfly_size=8, n_factors=1, block=1).layout(8, 8)
    shuffled = FlatBlockButterflySparsityConfig(
        butterfly_size=8, n_factors=1, block=1, shuffle=True
    ).layout(8, 8)
    for group in range(4):
        for place in range(2):
            np.testing.assert_array_equal(
                shuffled[:, place * 4 + group], plain[:, group * 2 + place]
            )


def test_global_rows_and_columns() -> None:
    layout = FlatBlockButterflySparsityConfig(
        butterfly_size=4, n_factors=1, block=2, global_size=3
    ).layout(16, 16)
    assert layout[:2].all()
    assert layout[:, :2].all()
    assert not layout[2:, 2:].all()


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        # From the parameter counts of table 3.8: of a 768 x 2304 matrix.
        (NinjaTurtleSparsityConfig(block=16, window_size=16, stripes=1, step=2, gtoken=16), 610),
        (NinjaTurtleSparsityConfig(block=32, window_size=32, stripes=2, step=2, gtoken=64), 507),
        (
            ButterflyGlobalSparsityConfig(block=16, window_size=16, stripes=1, step=2, gtoken=16),
            470,
        ),
    ],
)
def test_windows_and_stripes(config: SparsityConfig, blocks: int) -> None:
    assert config.layout(2304, 768).sum() == blocks
    assert config.layout(768, 2304).sum() == blocks
    assert config.layout(2304, 768)[: config.gtoken // config.block].all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"butterfly_size": 12, "n_factors": 1}, "power of 2"),
        ({"butterfly_size": 16, "n_factors": 5}, "n_factors is 5"),
        ({"butterfly_size": 16, "n_factors": 2, "block": 0}, "block"),
        ({"butterfly_size": "16", "n_factors": 2}, "butterfly_size"),
    ],
)
def test_wrong_options(options: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        FlatBlockButterflySparsityConfig(**options)


def test_a_pattern_that_does_not_fit() -> None:
    with pytest.raises(UserError, match="butterfly_size 16 does not divide"):
        FlatBlockButterflySparsityConfig(butterfly_size=16, n_factors=2, block=4).layout(40, 32)
    with pytest.raises(UserError, match="blocks of 32 do not divide"):
        BlockdiagSparsityConfig(nblocks=2).layout(40, 32)


def test_mappings() -> None:
    config = FlatBlockButterflySparsityConfig(butterfly_size=16, n_factors=2)
    text = "src.models.layers.fastlinear.FlatBlockButterflySparsityConfig"
    given = {"_target_": text, "butterfly_size": 16, "n_factors": 2}
    assert SparsityConfig.of(given) == config
    assert hash(SparsityConfig.of(given)) == hash(config)
    assert SparsityConfig.of(config.to_dict()) == config
    assert SparsityConfig.of(config) is config


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"_target_": "BlockdiagSparsity", "nblocks": 2}, "did you mean 'BlockdiagSparsityConfig'"),
        ({"_target_": "BlockdiagSparsityConfig", "nblock": 2}, "did you mean 'nblocks'"),
        ({"_target_": "BlockdiagSparsityConfig"}, "needs the option 'nblocks'"),
        ({"nblocks": 2}, "'_target_'"),
        (3, "not a sparsity config"),
    ],
)
def test_wrong_mappings(given: object, text: str) -> None:
    with pytest.raises(UserError, match=text):
        SparsityConfig.of(given)
