"""From sparse to dense and back in the middle of training, on arrays as checkpoints hold them."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import BlockdiagLinear, LinearConfig, LowRank, MonarchLinear
from monarch_flow.projection import (
    LayerSpec,
    densify_training_state,
    monarch_to_dense,
    structured_layers,
)
from monarch_flow.projection.state_dicts import project_weights
from monarch_flow.projection.structures import structure_of
from tests.tolerances import assert_close

SIZES = [(12, 20, 4), (20, 12, 4), (10, 7, 4), (7, 10, 4), (9, 26, 5)]


def gradients(
    state: dict[str, np.ndarray], gradient: np.ndarray, size: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """Pull-back of a dense gradient; the matrix is linear in each factor: differences are exact."""
    inputs, outputs, _ = size
    result = {}
    for name in ("blkdiag1", "blkdiag2"):
        pulled = np.zeros_like(state[name])
        for index in np.ndindex(pulled.shape):
            step = {key: array.copy() for key, array in state.items()}
            step[name][:] = 0.0
            step[name][index] = 1.0
            dense = monarch_to_dense(step["blkdiag1"], step["blkdiag2"], outputs, inputs)
            pulled[index] = (dense * gradient).sum()
        result[name] = pulled
    return result


def monarch_arrays(size: tuple[int, int, int], seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    layer = MonarchLinear(size[0], size[1], nblocks=size[2])
    return {
        name: random.standard_normal(tuple(parameter.shape)) * 0.3
        for name, parameter in layer.named_parameters()
        if name != "bias"
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias_first", [True, False])
def test_weights_moments_and_averages_of_a_monarch_layer(
    size: tuple[int, int, int], bias_first: bool
) -> None:
    inputs, outputs, nblocks = size
    random = np.random.default_rng(1)
    factors, averaged = monarch_arrays(size), monarch_arrays(size, 2)
    # A gradient of the tangent space: what a step on each factor changes.
    steps = monarch_arrays(size, 3)
    tangent = monarch_to_dense(steps["blkdiag1"], factors["blkdiag2"], outputs, inputs)
    tangent += monarch_to_dense(factors["blkdiag1"], steps["blkdiag2"], outputs, inputs)
    first = gradients(factors, tangent, size)
    second = {name: array**2 + 0.1 for name, array in first.items()}
    bias = random.standard_normal(outputs)

    def named(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As a checkpoint has them, in either order of the layer's arrays."""
        layer = {"bias": bias, **arrays} if bias_first else {**arrays, "bias": bias}
        return {
            "before": np.ones(2),
            **{f"blocks.0.fc1.{key}": array for key, array in layer.items()},
            "norm.weight": np.ones(3),
        }

    optimizer = {f"exp_avg/{name}": array for name, array in named(first).items()}
    optimizer |= {f"exp_avg_sq/{name}": array for name, array in named(second).items()}
    optimizer |= {f"ema/{name}": array for name, array in named(averaged).items()}
    optimizer["step"] = np.array(17)
    layers = {"blocks.0.fc1": LayerSpec("monarch", inputs, outputs, nblocks)}
    new = densify_training_state(named(factors), optimizer, layers)

    dense = monarch_to_dense(factors["blkdiag1"], factors["blkdiag2"], outputs, inputs)
    assert set(new.model) == {"before", "blocks.0.fc1.weight", "blocks.0.fc1.bias", "norm.weight"}
    assert_close(new.model["blocks.0.fc1.weight"], dense, dtype="float64", reduced=inputs)
    np.testing.assert_array_equal(new.model["blocks.0.fc1.bias"], bias)
    assert_close(
        new.optimizer["ema/blocks.0.fc1.weight"],
        monarch_to_dense(averaged["blkdiag1"], averaged["blkdiag2"], outputs, inputs),
        dtype="float64",
        reduced=inputs,
    )
    assert set(new.optimizer) == {
        "step",
        *(f"exp_avg/{name}" for name in new.model),
        *(f"exp_avg_sq/{name}" for name in new.model),
        *(f"ema/{name}" for name in new.model),
    }
    assert new.optimizer["step"] == 17
    found = new.optimizer["exp_avg/blocks.0.fc1.weight"]
    np.testing.assert_allclose(found, tangent, rtol=1e-7, atol=1e-8)
    squares = new.optimizer["exp_avg_sq/blocks.0.fc1.weight"]
    assert squares.shape == (outputs, inputs)
    assert (squares >= found**2 * (1 - 1e-9)).all()
    assert (squares > 0).all()
    (report,) = new.reports
    assert report.name == "blocks.0.fc1"
    assert report.relative_error == 0.0


@pytest.mark.parametrize("size", [(16, 32, 4), (32, 16, 4), (12, 20, 4), (10, 7, 4)])
def test_second_moments_of_independent_rank_one_gradients(size: tuple[int, int, int]) -> None:
    inputs, outputs, nblocks = size
    random = np.random.default_rng(4)
    factors = monarch_arrays(size)
    variance = np.outer(random.uniform(0.5, 4, outputs), random.uniform(0.5, 4, inputs))
    squared = {name: array**2 for name, array in factors.items()}
    # E of the squared pull-back of independent entries: the pull-back of V by squared factors.
    second = gradients(squared, variance, size)
    new = densify_training_state(
        {f"fc.{name}": array for name, array in factors.items()},
        {f"exp_avg_sq/fc.{name}": array for name, array in second.items()},
        {"fc": LayerSpec("monarch", inputs, outputs, nblocks)},
    )
    found = new.optimizer["exp_avg_sq/fc.weight"]
    if inputs % nblocks**2 == 0:
        np.testing.assert_allclose(found, variance, rtol=1e-9)
    else:
        # Some pieces have no slot: there it is the mean of rows and columns.
        close = np.isclose(found, variance, rtol=1e-9)
        assert 0.2 < close.mean() < 1
        assert 0.2 < np.median(found[~close] / variance[~close]) < 5


def test_entries_and_low_rank_layers_are_carried_over() -> None:
    random = np.random.default_rng(5)
    blockdiag = BlockdiagLinear(8, 12, nblocks=4, shuffle=True, bias=False, dtype=flow.float64)
    low_rank = LowRank(8, 12, 3, bias=False, dtype=flow.float64)
    block_sparse = LinearConfig.of(
        {
            "_target_": "BlockSparseLinear",
            "sparsity_config": {
                "_target_": "FlatBlockButterflySparsityConfig",
                "butterfly_size": 4,
                "n_factors": 1,
                "block": 2,
            },
        }
    ).build(8, 12, bias=False, dtype=flow.float64)
    model = nn.Sequential(blockdiag, low_rank, block_sparse)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    first = {name: random.standard_normal(tuple(p.shape)) for name, p in parameters.items()}
    optimizer = {f"exp_avg/{name}": array for name, array in first.items()}
    optimizer |= {f"exp_avg_sq/{name}": array**2 for name, array in first.items()}
    optimizer |= {f"ema/{name}": state[name] for name in first}
    new = densify_training_state(state, optimizer, structured_layers(model))
    assert set(new.model) == {"0.weight", "1.weight", "2.weight"}
    for index, layer in enumerate(model):
        dense = layer.dense().numpy()
        np.testing.assert_allclose(new.model[f"{index}.weight"], dense, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(
            new.optimizer[f"ema/{index}.weight"], new.model[f"{index}.weight"]
        )
    for index in (0, 2):
        moment = new.optimizer[f"exp_avg/{index}.weight"]
        kept = np.sort(moment[moment != 0])
        np.testing.assert_array_equal(kept, np.sort(first[f"{index}.weight"].ravel()))
        # Where the weight has its entries.
        np.testing.assert_array_equal(moment != 0, new.model[f"{index}.weight"] != 0)
        squares = new.optimizer[f"exp_avg_sq/{index}.weight"]
        assert (squares > 0).all()
        assert (squares >= moment**2).all()
    # The low-rank layer's average fits both equations as well as any matrix does.
    factor1, factor2 = state["1.lr_weight1"], state["1.lr_weight2"]
    equations = np.concatenate([np.kron(np.eye(12), factor1), np.kron(factor2.T, np.eye(8))])
    given = [first["1.lr_weight2"].ravel(), first["1.lr_weight1"].ravel()]
    wanted = np.linalg.lstsq(equations, np.concatenate(given), rcond=None)[0]
    np.testing.assert_allclose(new.optimizer["exp_avg/1.weight"].ravel(), wanted, atol=1e-9)


BUTTERFLY = {
    "_target_": "FlatBlockButterflySparsityConfig",
    "butterfly_size": 4,
    "n_factors": 1,
    "block": 2,
}
BLOCK_SPARSE = {"_target_": "BlockSparseLinear", "sparsity_config": BUTTERFLY}
UNGATED = {"_target_": "SparseLRLinear", "rank": 2, "gating": False}
KINDS: dict[str, dict[str, Any]] = {
    "monarch": {"_target_": "MonarchLinear", "nblocks": 2},
    "monarch, padded": {"_target_": "MonarchLinear", "nblocks": 3},
    "blockdiag": {"_target_": "BlockdiagLinear", "nblocks": 3, "shuffle": True},
    "low rank": {"_target_": "LowRank", "rank": 3},
    "block sparse": BLOCK_SPARSE,
    "masked": {"_target_": "MaskedLinear", "sparsity_config": BUTTERFLY},
    "pixelfly": {**UNGATED, "sparse_cfg": BLOCK_SPARSE},
    "monarch and low rank": {**UNGATED, "sparse_cfg": "monarch"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_least_gradient_that_its_moments_ask_for(kind: str) -> None:
    """Against numpy's lstsq on the layer's own Jacobian, by differences, which are exact."""
    flow.manual_seed(1)
    layer = LinearConfig.of(KINDS[kind]).build(8, 12, bias=False, dtype=flow.float64)
    spec = structured_layers(nn.Sequential(layer))["0"]
    structure = structure_of(spec)
    arrays = {name: value.numpy() for name, value in layer.state_dict().items()}
    here = structure.dense(arrays)
    np.testing.assert_allclose(here, layer.dense().numpy(), rtol=1e-12, atol=1e-13)
    random = np.random.default_rng(8)
    gradient = random.standard_normal((12, 8))
    rows, moment = [], {}
    for name in structure.names:
        moment[name] = np.zeros_like(arrays[name])
        for index in np.ndindex(arrays[name].shape):
            moved = {key: array.copy() for key, array in arrays.items()}
            moved[name][index] += 1.0
            rows.append((structure.dense(moved) - here).ravel())
            moment[name][index] = rows[-1] @ gradient.ravel()
    pulled = structure.pull_back(arrays, gradient)
    given = np.concatenate([moment[name].ravel() for name in structure.names])
    for name in structure.names:
        np.testing.assert_allclose(pulled[name], moment[name], rtol=1e-9, atol=1e-10)
    wanted = np.linalg.lstsq(np.stack(rows), given, rcond=1e-10)[0]
    found = structure.first_moment(arrays, moment)
    np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-4, atol=1e-4)
    if "and" not in kind and kind != "pixelfly":
        np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-8, atol=1e-9)

    variance = np.outer(random.uniform(0.5, 4, 12), random.uniform(0.5, 4, 8))
    squares = (np.stack(rows) ** 2) @ variance.ravel()
    second, start = {}, 0
    for name in structure.names:
        size = arrays[name].size
        second[name] = squares[start : start + size].reshape(arrays[name].shape)
        start += size
    estimate = structure.second_moment(arrays, second)
    certain = structure.certain(arrays)
    np.testing.assert_allclose(estimate[certain], variance[certain], rtol=1e-9)
    assert (estimate >= 0).all()
    assert 0.3 < np.median(estimate / variance) < 3


def test_projected_weights_and_back() -> None:
    random = np.random.default_rng(7)
    state = {
        "fc1.weight": random.standard_normal((12, 8)),
        "fc1.bias": random.standard_normal(12),
        "head.weight": random.standard_normal((3, 12)),
    }
    new, layers, (report,) = project_weights(state, [("fc1", LinearConfig.of("monarch"))])
    assert set(new) == {"fc1.bias", "fc1.blkdiag1", "fc1.blkdiag2", "head.weight"}
    assert layers == {"fc1": LayerSpec("monarch", 8, 12, nblocks=4)}
    np.testing.assert_array_equal(new["fc1.bias"], state["fc1.bias"])
    again = densify_training_state(new, {}, layers)
    lost = np.linalg.norm(again.model["fc1.weight"] - state["fc1.weight"])
    assert lost == pytest.approx(report.error)
    assert report.numbers == 4 * 2 * 2 + 4 * 3 * 2


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"exp_avg/fc.blkdiag1": np.ones((4, 2, 2))}, "no exp_avg/fc.blkdiag2"),
        ({"sum/fc.blkdiag1": np.ones((4, 2, 2))}, "'sum/fc.blkdiag1' belongs to a structured"),
    ],
)
def test_moments_that_cannot_be_read_are_refused(
    optimizer: dict[str, np.ndarray], message: str
) -> None:
    model = {f"fc.{name}": array for name, array in monarch_arrays((8, 12, 4)).items()}
    with pytest.raises(UserError, match=message):
        densify_training_state(model, optimizer, {"fc": LayerSpec("monarch", 8, 12, 4)})


def test_what_has_no_dense_form_is_refused() -> None:
    model = nn.Sequential(LinearConfig.of("pixelfly").build(512, 512))
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"0: a SparseLR layer with a gate has no dense weight"):
        densify_training_state(state, {}, structured_layers(model))
    with pytest.raises(UserError, match="has no array 'blkdiag1'"):
        densify_training_state({}, {}, {"fc": LayerSpec("monarch", 8, 12, 4)})
    with pytest.raises(UserError, match="unknown kind of layer 'toeplitz'"):
        densify_training_state({}, {}, {"fc": LayerSpec("toeplitz", 8, 12)})
