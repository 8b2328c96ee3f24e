"""Modules and whole models: dense to structured and back, in place."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import LinearConfig, MonarchLinear, SparseLRLinear
from monarch_flow.projection import (
    densify_model,
    project_model,
    structured_layers,
)
from monarch_flow.projection.state_dicts import total_relative_error
from tests.monarch_flow.monarch_reference import best_squared_error, dense_by_slots
from tests.tolerances import assert_close

BUTTERFLY = {
    "_target_": "FlatBlockButterflySparsityConfig",
    "butterfly_size": 4,
    "n_factors": 1,
    "block": 2,
}
BLOCK_SPARSE = {"_target_": "BlockSparseLinear", "sparsity_config": BUTTERFLY}
CONFIGS: dict[str, Any] = {
    "monarch": {"_target_": "MonarchLinear", "nblocks": 4},
    "monarch, padded": {"_target_": "MonarchLinear", "nblocks": 3},
    "blockdiag": {"_target_": "BlockdiagLinear", "nblocks": 4},
    "blockdiag, shuffled and padded": {
        "_target_": "BlockdiagLinear",
        "nblocks": 3,
        "shuffle": True,
    },
    "low rank": {"_target_": "LowRank", "rank": 3},
    "block sparse": BLOCK_SPARSE,
    "masked": {"_target_": "MaskedLinear", "sparsity_config": BUTTERFLY},
    "pixelfly without gate": {
        "_target_": "SparseLRLinear",
        "sparse_cfg": BLOCK_SPARSE,
        "rank": 2,
        "gating": False,
    },
    "monarch and low rank": {
        "_target_": "SparseLRLinear",
        "sparse_cfg": "monarch",
        "rank": 2,
        "gating": False,
    },
    "dense and low rank": {
        "_target_": "SparseLRLinear",
        "sparse_cfg": None,
        "rank": 2,
        "gating": False,
    },
}

# Their two parts are found by turns, which comes near and not always there.
ITERATED = ("pixelfly without gate", "monarch and low rank")


def projected(linear: nn.Module, config: Any) -> nn.Module:
    place = nn.Sequential(linear)
    project_model(place, config)
    return place[0]


def densified(layer: nn.Module) -> nn.Module:
    place = nn.Sequential(layer)
    densify_model(place)
    return place[0]


def images(*shape: int) -> flow.Tensor:
    return flow.tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_with_a_structured_weight_survives_both_ways(kind: str, bias: bool) -> None:
    """Densify a layer: the same function. Project that: the same function again."""
    flow.manual_seed(1)
    layer = LinearConfig.of(CONFIGS[kind]).build(8, 20, bias=bias, dtype=flow.float64)
    x = flow.tensor(np.random.default_rng(0).standard_normal((5, 8)))
    wanted = layer(x).numpy()
    linear = densified(layer)
    assert type(linear) is nn.Linear
    assert linear.weight.dtype == flow.float64
    assert (linear.bias is None) == (not bias)
    assert_close(linear.weight.numpy(), layer.dense().numpy(), dtype="float64", reduced=8)
    assert_close(linear(x).numpy(), wanted, dtype="float64", reduced=8)

    again = projected(linear.eval(), CONFIGS[kind])
    assert type(again) is type(layer)
    assert not again.training
    assert [name for name, _ in again.named_parameters()] == [
        name for name, _ in layer.named_parameters()
    ]
    if kind in ITERATED:
        lost = np.linalg.norm((again.dense() - layer.dense()).numpy())
        assert lost < 0.1 * np.linalg.norm(layer.dense().numpy())
    else:
        assert_close(again(x).numpy(), wanted, dtype="float64", reduced=8)
    # The layers that went in are as they were.
    assert_close(layer(x).numpy(), wanted, dtype="float64")


@pytest.mark.parametrize("kind", CONFIGS)
def test_projecting_any_matrix_comes_no_worse_than_the_class_allows(kind: str) -> None:
    flow.manual_seed(2)
    linear = nn.Linear(16, 24)
    place = nn.Sequential(linear)
    (report,) = project_model(place, CONFIGS[kind])
    weight = linear.weight.numpy().astype(np.float64)
    error = np.linalg.norm(weight - place[0].dense().numpy())
    assert report.error == pytest.approx(error, rel=1e-4, abs=1e-6)
    assert report.relative_error == pytest.approx(error / np.linalg.norm(weight), abs=1e-6)
    assert report.relative_error < (1e-6 if kind == "dense and low rank" else 1)
    np.testing.assert_array_equal(place[0].bias.numpy(), linear.bias.numpy())
    if kind == "monarch":
        shapes = tuple(place[0].blkdiag1.shape), tuple(place[0].blkdiag2.shape)
        assert error == pytest.approx(best_squared_error(weight, *shapes) ** 0.5, rel=1e-5)
    if kind == "monarch and low rank":
        (alone,) = project_model(nn.Sequential(linear), CONFIGS["monarch"])
        assert report.error < alone.error


def test_pixelfly_with_a_gate_is_half_way_open_after_projection_and_is_not_densified_trained() -> (
    None
):
    flow.manual_seed(3)
    linear = nn.Linear(8, 8)
    config = {"_target_": "SparseLRLinear", "sparse_cfg": BLOCK_SPARSE, "rank": 2}
    layer = projected(linear, config)
    assert isinstance(layer, SparseLRLinear)
    assert not layer.gate.weight.numpy().any()
    x = images(4, 8)
    # As long as the gate is the same for every input there is a dense weight.
    assert_close(densified(layer)(x).numpy(), layer(x).numpy(), reduced=8)
    layer.reset_parameters()
    model = nn.Sequential(MonarchLinear(8, 8), nn.Sequential(layer))
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=r"1\.0: a SparseLR layer with a gate .* depends on the"):
        densify_model(model)
    assert [type(module) for module in model.modules()] == kinds


class Tied(nn.Module):
    """One layer in two places, a layer without bias, and one that is not to be touched."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.ModuleList([nn.Sequential(self.first, nn.GELU()), nn.Linear(6, 9, False)])
        self.head = nn.Linear(9, 2)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.head(self.inner[1](self.inner[0](self.first(x))))


def test_names_ties_dtypes_and_flags_are_kept() -> None:
    flow.manual_seed(4)
    model = Tied().to(flow.float64)
    model.first.weight.requires_grad_(False)
    model.inner[1].eval()
    x = flow.tensor(np.random.default_rng(1).standard_normal((3, 6)))
    reports = project_model(model, "monarch", exclude="head")
    assert [report.name for report in reports] == ["first", "inner.1"]
    assert isinstance(model.first, MonarchLinear)
    assert model.inner[0][0] is model.first
    assert type(model.head) is nn.Linear
    assert model.inner[1].bias is None
    assert not model.inner[1].training
    assert model.first.training
    assert not model.first.blkdiag1.requires_grad
    assert model.first.bias.requires_grad
    assert model.inner[1].blkdiag2.requires_grad
    assert {parameter.dtype for parameter in model.parameters()} == {flow.float64}
    assert 0 < total_relative_error(reports) < 1

    wanted = model(x).numpy()
    assert list(structured_layers(model)) == ["first", "inner.1"]
    reports = densify_model(model)
    assert [report.relative_error for report in reports] == [0.0, 0.0]
    assert model.inner[0][0] is model.first
    assert not model.first.weight.requires_grad
    assert not model.inner[1].training
    assert set(model.state_dict()) == set(Tied().state_dict())
    assert_close(model(x).numpy(), wanted, dtype="float64", reduced=9)


def test_a_model_is_unchanged_where_it_cannot_be_projected() -> None:
    model = Tied()
    weight = model.head.weight.numpy().copy()
    weight[0, 0] = np.inf
    model.head.weight = nn.Parameter(flow.tensor(weight))
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="head: the weight holds NaN or infinity"):
        project_model(model, "monarch")
    with pytest.raises(UserError, match=r"no nn\.Linear has a name"):
        project_model(model, "monarch", include="attention")
    with pytest.raises(UserError, match="not a regular expression"):
        project_model(model, "monarch", include="(")
    with pytest.raises(UserError, match="is one MonarchLinear"):
        densify_model(MonarchLinear(4, 4))
    after = {name: value.numpy() for name, value in model.state_dict().items()}
    assert list(before) == list(after)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


def test_dense_configs_replace_nothing() -> None:
    linear = nn.Linear(3, 3)
    assert projected(linear, None) is linear
    assert project_model(nn.Sequential(linear), "dense") == []
    assert densify_model(nn.Sequential(linear)) == []


def test_half_precision_layers() -> None:
    flow.manual_seed(5)
    linear = nn.Linear(8, 12)
    wide = projected(linear, "monarch")
    layer = projected(linear.to(flow.float16), "monarch")
    assert layer.blkdiag1.dtype == flow.float16
    factors = (layer.blkdiag1.numpy(), layer.blkdiag2.numpy())
    np.testing.assert_allclose(dense_by_slots(*factors), wide.dense().numpy(), atol=2e-3)
    assert densified(layer).weight.dtype == flow.float16
