"""The other structured layers: function, start values, state, and what they do in nn.Graph."""

from __future__ import annotations

import math
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import (
    BlockdiagLinear,
    BlockSparseLinear,
    LinearConfig,
    LowRank,
    MaskedLinear,
    SparseLRLinear,
    StructuredLinear,
)
from tests.tolerances import assert_close

BUTTERFLY = {
    "_target_": "FlatBlockButterflySparsityConfig",
    "butterfly_size": 4,
    "n_factors": 1,
    "block": 4,
}
DIAGONAL = {"_target_": "BlockdiagSparsityConfig", "nblocks": 3, "block": 4, "global_size": 4}
# One of each kind, as configs; all are linear.
LINEAR = {
    "monarch": {"_target_": "monarch", "nblocks": 3},
    "blockdiag": {"_target_": "blockdiag", "nblocks": 3},
    "blockdiag shuffled": {"_target_": "blockdiag", "nblocks": 3, "shuffle": True},
    "low rank": {"_target_": "low_rank", "rank": 3},
    "low rank svd": {"_target_": "low_rank", "rank": 0.3, "init": "svd"},
    "butterfly": {"_target_": "BlockSparseLinear", "sparsity_config": BUTTERFLY},
    "diagonal": {"_target_": "BlockSparseLinear", "sparsity_config": DIAGONAL},
    "masked": {"_target_": "MaskedLinear", "sparsity_config": DIAGONAL},
    "sparse + low rank": {
        "_target_": "SparseLRLinear",
        "sparse_cfg": {"_target_": "monarch", "nblocks": 3},
        "rank": 2,
        "gating": False,
    },
    "dense + low rank": {
        "_target_": "SparseLRLinear",
        "sparse_cfg": "dense",
        "rank": 2,
        "gating": False,
    },
}
# Divisible by everything, and by nothing; the butterfly needs multiples of 16.
WIDTHS = [(48, 96), (96, 48), (31, 47)]


def built(name: str, widths: tuple[int, int], **more: Any) -> StructuredLinear:
    return LinearConfig.of({**LINEAR[name], **more}).build(*widths, dtype=flow.float64)


def copied(parameter: flow.Tensor, values: np.ndarray) -> None:
    with flow.no_grad():
        parameter.copy_(flow.tensor(values, dtype=parameter.dtype))


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", LINEAR)
def test_a_layer_is_its_dense_matrix(name: str, widths: tuple[int, int]) -> None:
    """Forward on any number of axes, and gradients, against a numpy product with dense()."""
    layer = built(name, widths)
    matrix, bias = layer.dense().numpy(), layer.bias.numpy()
    assert matrix.shape == (widths[1], widths[0])
    other = built(name, widths)
    other.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(other.dense().numpy(), matrix)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, widths[0]))
    expected = x @ matrix.T + bias
    given = flow.tensor(x, requires_grad=True)
    y = layer(given)
    assert_close(y.numpy(), expected, dtype="float64", reduced=100)
    assert_close(layer(flow.tensor(x[1, 2])).numpy(), expected[1, 2], dtype="float64", reduced=100)
    y_grad = rng.standard_normal(y.shape)
    y.backward(flow.tensor(y_grad))
    assert_close(given.grad.numpy(), y_grad @ matrix, dtype="float64", reduced=100)
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_the_parameters(name: str) -> None:
    """The derivative along a random direction, against a central difference."""
    layer = built(name, (31, 47))
    rng = np.random.default_rng(1)
    x = flow.tensor(rng.standard_normal((5, 31)))
    y_grad = flow.tensor(rng.standard_normal((5, 47)))
    (layer(x) * y_grad).sum().backward()
    for parameter in layer.parameters():
        start, direction = parameter.numpy().copy(), rng.standard_normal(parameter.shape)
        losses = []
        for sign in (1, -1):
            copied(parameter, start + sign * 1e-5 * direction)
            losses.append(float((layer(x) * y_grad).sum().numpy()))
        copied(parameter, start)
        difference = (losses[0] - losses[1]) / 2e-5
        np.testing.assert_allclose(
            (parameter.grad.numpy() * direction).sum(), difference, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("name", LINEAR)
def test_without_bias(name: str) -> None:
    layer = built(name, (48, 96), bias=False)
    assert layer.bias is None
    assert "bias" not in layer.state_dict()
    np.testing.assert_array_equal(layer(flow.zeros(2, 48, dtype=flow.float64)).numpy(), 0)


@pytest.mark.parametrize("name", LINEAR)
def test_global_parameters(name: str) -> None:
    layer = built(name, (31, 47))
    x = flow.randn(3, 31, dtype=flow.float64)
    expected, matrix = layer(x).numpy(), layer.dense().numpy()
    placement = flow.placement("cpu", [0])
    layer.to_global(placement, flow.sbp.broadcast)
    y = layer(x.to_global(placement, flow.sbp.split(0)))
    assert y.is_global
    assert_close(y.numpy(), expected, dtype="float64", reduced=31)
    assert_close(layer.dense().numpy(), matrix, dtype="float64", reduced=31)


@pytest.mark.parametrize("shuffle", [False, True])
def test_blockdiag_is_block_diagonal(shuffle: bool) -> None:
    layer = BlockdiagLinear(6, 10, nblocks=2, shuffle=shuffle, dtype=flow.float64)
    weight = layer.weight.numpy()
    assert weight.shape == (2, 5, 3)
    expected = np.zeros((10, 6))
    expected[:5, :3], expected[5:, 3:] = weight
    if shuffle:
        # Place c 2 + g holds input g 3 + c.
        expected = expected[:, np.argsort([0, 3, 1, 4, 2, 5])]
    np.testing.assert_array_equal(layer.dense().numpy(), expected)


def test_blockdiag_start() -> None:
    """Bound sqrt(nblocks) / sqrt(n'), std 0.0417 of the spec; 0.02 sqrt(nblocks) under a normal
    rule."""
    flow.manual_seed(0)
    layer = BlockdiagLinear(768, 2304)
    values = layer.weight.numpy()
    assert values.shape == (4, 576, 192)
    np.testing.assert_allclose(np.abs(values).max(), 2 / math.sqrt(768), rtol=1e-3)
    np.testing.assert_allclose(values.std(), 0.0417, rtol=0.01)
    np.testing.assert_allclose(np.abs(layer.bias.numpy()).max(), 1 / math.sqrt(2304), rtol=0.01)
    layer.reset_dense_init(lambda weight: nn.init.normal_(weight, 0.0, 0.02))
    np.testing.assert_allclose(layer.weight.numpy().std(), 0.04, rtol=0.01)
    np.testing.assert_array_equal(layer.bias.numpy(), 0)
    layer.reset_dense_init(nn.init.zeros_, nn.init.ones_)
    np.testing.assert_array_equal(layer.bias.numpy(), 1)


def test_block_sparse_stores_its_blocks_in_row_major_order() -> None:
    layer = BlockSparseLinear(10, 15, BUTTERFLY | {"butterfly_size": 2, "block": 2})
    # Tiles of 8 x 5 on a padded 16 x 10 matrix; all four are there with one factor of two.
    assert tuple(layer.weight.shape) == (40, 2, 2)
    layer = BlockSparseLinear(8, 12, {**DIAGONAL, "nblocks": 2, "global_size": 0, "block": 2})
    assert layer.layout.numpy().tolist() == [[1, 1, 0, 0]] * 3 + [[0, 0, 1, 1]] * 3
    copied(layer.weight, np.arange(48.0).reshape(12, 2, 2))
    matrix = layer.dense().numpy()
    np.testing.assert_array_equal(matrix[:2, :4], [[0, 1, 4, 5], [2, 3, 6, 7]])
    np.testing.assert_array_equal(matrix[6:8, 4:], [[24, 25, 28, 29], [26, 27, 30, 31]])
    assert not matrix[:6, 4:].any()
    assert not matrix[6:, :4].any()


def test_block_sparse_start() -> None:
    """Each row of blocks is scaled by the root of all over kept; bias 1/sqrt(n')."""
    flow.manual_seed(0)
    layer = BlockSparseLinear(766, 3072, {**DIAGONAL, "nblocks": 4, "block": 32, "global_size": 32})
    assert tuple(layer.weight.shape) == (666, 32, 32)
    assert layer.macs_per_row() == 666 * 32 * 32
    weight, layout = layer.weight.numpy(), layer.layout.numpy()
    row_of_block = np.nonzero(layout)[0]
    bound = 1 / math.sqrt(768)
    for row, kept in ((0, 24), (1, 6), (95, 7)):
        largest = np.abs(weight[row_of_block == row]).max()
        np.testing.assert_allclose(largest, bound * math.sqrt(24 / kept), rtol=2e-3)
    np.testing.assert_allclose(np.abs(layer.bias.numpy()).max(), bound, rtol=0.01)
    layer.reset_dense_init(nn.init.ones_)
    np.testing.assert_allclose(layer.weight.numpy()[row_of_block == 1], 2.0, rtol=1e-6)
    np.testing.assert_array_equal(layer.bias.numpy(), 0)


def test_an_unknown_backend() -> None:
    with pytest.raises(UserError, match="'cusparse'"):
        BlockSparseLinear(32, 64, BUTTERFLY, backend="cusparse")


def test_a_checkpoint_of_another_pattern_is_refused() -> None:
    """Same shapes, other blocks: without the check the weights would land in wrong places."""
    plain = BlockSparseLinear(32, 32, BUTTERFLY)
    shuffled = BlockSparseLinear(32, 32, {**BUTTERFLY, "shuffle": True})
    assert plain.weight.shape == shuffled.weight.shape
    with pytest.raises(RuntimeError, match="other blocks"):
        plain.load_state_dict(shuffled.state_dict())


def test_masked_start() -> None:
    """1/sqrt(n density), so that the output has the variance of a dense layer's."""
    flow.manual_seed(0)
    layer = MaskedLinear(768, 3072, {**DIAGONAL, "nblocks": 4, "block": 1, "global_size": 0})
    assert layer.saving == 0.25
    assert layer.macs_per_row() == 768 * 3072 // 4
    assert layer.weight.numel() == 768 * 3072
    np.testing.assert_allclose(np.abs(layer.weight.numpy()).max(), 2 / math.sqrt(768), rtol=1e-3)
    np.testing.assert_allclose(layer(flow.randn(256, 768)).numpy().var(), 1 / 3, rtol=0.05)
    assert sorted(layer.state_dict()) == ["bias", "weight"]


def test_no_weight_decay_is_told() -> None:
    assert LowRank(8, 8, 2, weight_decay=False).no_weight_decay == ("lr_weight1", "lr_weight2")
    assert BlockSparseLinear(32, 32, BUTTERFLY, weight_decay=False).no_weight_decay == ("weight",)
    assert LowRank(8, 8, 2).no_weight_decay == ()


def pixelfly(**more: Any) -> SparseLRLinear:
    sparse = {"_target_": "BlockSparseLinear", "sparsity_config": BUTTERFLY}
    return SparseLRLinear(32, 48, sparse, rank=4, **more)


def test_pixelfly_blends_its_parts() -> None:
    layer = pixelfly(dtype=flow.float64)
    x = np.random.default_rng(0).standard_normal((5, 32))
    gate = layer.gate.weight.numpy(), layer.gate.bias.numpy()
    g = 1 / (1 + np.exp(-(x @ gate[0].T + gate[1])))
    sparse, low_rank = x @ layer.sparse.dense().numpy().T, x @ layer.low_rank.dense().numpy().T
    expected = (1 - g) * sparse + g * low_rank + layer.bias.numpy()
    assert_close(layer(flow.tensor(x)).numpy(), expected, dtype="float64", reduced=32)


def test_pixelfly_keys_and_counts() -> None:
    layer = pixelfly()
    assert sorted(layer.state_dict()) == [
        "bias",
        "gate.bias",
        "gate.weight",
        "low_rank.lr_weight1",
        "low_rank.lr_weight2",
        "sparse.layout",
        "sparse.weight",
    ]
    parameters = sum(p.numel() for p in layer.parameters())
    assert parameters == layer.sparse.weight.numel() + 4 * (32 + 48) + 33 + 48
    assert layer.sparse.weight.numel() == 32 * 48 // 2
    assert layer.macs_per_row() == parameters - 48 - 1
    # The bias of the gate is there whatever the layer's is.
    assert sorted(pixelfly(bias=False).state_dict())[:2] == ["gate.bias", "gate.weight"]
    assert "gate.weight" not in pixelfly(gating=False).state_dict()


def test_pixelfly_is_no_matrix_with_a_gate() -> None:
    with pytest.raises(UserError, match="gating: false"):
        pixelfly().dense()


@pytest.mark.parametrize("inner", ["sparse", "monarch"])
def test_checkpointing_changes_no_gradient(inner: str) -> None:
    config = "monarch" if inner == "monarch" else LINEAR["butterfly"]
    plain = SparseLRLinear(32, 48, config, rank=4)
    again = SparseLRLinear(32, 48, config, rank=4, checkpointing=True)
    again.load_state_dict(plain.state_dict())
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    found = []
    for layer in (plain, again):
        given = flow.tensor(x, requires_grad=True)
        y = layer(given)
        (y * y).sum().backward()
        found.append([y.numpy(), given.grad.numpy(), *(p.grad.numpy() for p in layer.parameters())])
    for expected, actual in zip(*found, strict=True):
        assert_close(actual, expected.astype(float), reduced=48)


def test_checkpointing_computes_twice() -> None:
    """Once forward and once for the gradient; without a gradient once."""
    layer, runs = pixelfly(checkpointing=True), []
    blend = layer._blend
    layer._blend = lambda x: runs.append(1) or blend(x)
    layer(flow.randn(5, 32)).sum().backward()
    assert len(runs) == 2
    with flow.no_grad():
        layer(flow.randn(5, 32))
    assert len(runs) == 3


class _EveryLayer(nn.Module):
    """All kinds of layers beside one another, and the gated one."""

    def __init__(self) -> None:
        super().__init__()
        configs = [*LINEAR.values(), {"_target_": "pixelfly", "sparse_cfg": LINEAR["butterfly"]}]
        configs[-1]["rank"] = 3
        configs[-1]["checkpointing"] = True
        self.layers = nn.ModuleList([LinearConfig.of(config).build(31, 47) for config in configs])

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return flow.stack([layer(x) for layer in self.layers])


def test_graph_trains_as_eager_does() -> None:
    """Two steps of SGD: the losses are those of eager mode, so gradients are too."""
    flow.manual_seed(0)
    eager, traced = _EveryLayer(), _EveryLayer()
    traced.load_state_dict(eager.state_dict())
    x = flow.randn(6, 31)

    class Step(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = traced
            self.add_optimizer(flow.optim.SGD(traced.parameters(), lr=0.05))

        def build(self, x: flow.Tensor) -> flow.Tensor:
            loss = (self.model(x) ** 2).sum()
            loss.backward()
            return loss

    step = Step()
    optimizer = flow.optim.SGD(eager.parameters(), lr=0.05)
    for _ in range(3):
        loss = (eager(x) ** 2).sum()
        expected = float(loss.numpy())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        np.testing.assert_allclose(float(step(x).numpy()), expected, rtol=1e-5)
