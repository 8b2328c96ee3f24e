"""From sparse to dense and back in the middle of training, on arrays as checkpoints hold them."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import LinearConfig, MonarchLinear
from monarch_flow.projection import (
    LayerSpec,
    densify_training_state,
    monarch_to_dense,
    structured_layers,
)
from monarch_flow.projection.state_dicts import project_weights
from monarch_flow.projection.structures import structure_of
from tests.monarch_flow.projection.test_module_projection import CONFIGS, ITERATED
from tests.tolerances import assert_close

SIZES = [(20, 12, 4), (7, 10, 4)]


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


# A dense part leaves nothing to estimate.
KINDS = [kind for kind in CONFIGS if "dense" not in kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_least_gradient_that_its_moments_ask_for(kind: str) -> None:
    """Against numpy's lstsq on the layer's own Jacobian, by differences, which are exact."""
    flow.manual_seed(1)
    layer = LinearConfig.of(CONFIGS[kind]).build(8, 12, bias=False, dtype=flow.float64)
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
    if kind not in ITERATED:
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
