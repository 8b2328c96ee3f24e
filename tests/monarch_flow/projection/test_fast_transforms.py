"""Fast transforms as layers of factors, against numpy.fft and scipy in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oneflow_accel
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
import scipy.fft
import scipy.linalg
from oneflow import nn

from monarch_flow.engine.sparse_to_dense import SparseToDense
from monarch_flow.layers import ButterflyLinear, KaleidoscopeLinear
from monarch_flow.projection import (
    densify_model,
    densify_training_state,
    project_model,
    structured_layers,
    transforms,
)
from monarch_flow.projection.structures import find_layers, layers_from_json, layers_to_json
from tests.tolerances import assert_close

SIZES = (2, 4, 8, 64, 256)


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    oneflow_accel.select_device()


def pairs(matrix: np.ndarray) -> np.ndarray:
    """A complex matrix for real parts followed by imaginary ones."""
    return np.block([[matrix.real, -matrix.imag], [matrix.imag, matrix.real]])


FIXED: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]] = {
    "dft": (transforms.dft, lambda eye: pairs(np.fft.fft(eye, axis=0))),
    "inverse dft": (transforms.inverse_dft, lambda eye: pairs(np.fft.ifft(eye, axis=0))),
    "dct": (transforms.dct, lambda eye: scipy.fft.dct(eye, type=2, axis=0)),
    "dst": (transforms.dst, lambda eye: scipy.fft.dst(eye, type=2, axis=0)),
    "hadamard": (transforms.walsh_hadamard, lambda eye: scipy.linalg.hadamard(len(eye))),
}


@pytest.mark.parametrize("points", SIZES)
@pytest.mark.parametrize("name", FIXED)
def test_fixed_transforms(name: str, points: int) -> None:
    """In one butterfly, in (B B*)^2, and in float32."""
    make, expected = FIXED[name]
    matrix = expected(np.eye(points))
    layer = make(points, dtype=flow.float64)
    assert isinstance(layer, ButterflyLinear)
    assert_close(layer.dense().numpy(), matrix, dtype="float64", reduced=points)
    wide = transforms.as_kaleidoscope(layer)
    assert wide.grows == (False, True) * (1 if name == "hadamard" else 2)
    assert_close(wide.dense().numpy(), matrix, dtype="float64", reduced=points)
    assert_close(make(points).dense().numpy(), matrix, reduced=points)


@pytest.mark.parametrize("points", SIZES)
def test_convolutions(points: int) -> None:
    """One B B*, as Dao et al. 2020 have it."""
    rng = np.random.default_rng(points)
    column, row = rng.standard_normal((2, points))
    row[0] = column[0]
    circulant = transforms.circulant(column, dtype=flow.float64)
    toeplitz = transforms.toeplitz(column, row, dtype=flow.float64)
    matrices = scipy.linalg.circulant(column), scipy.linalg.toeplitz(column, row)
    for layer, matrix in zip((circulant, toeplitz), matrices, strict=True):
        assert layer.grows == (False, True)
        assert_close(layer.dense().numpy(), matrix, dtype="float64", reduced=points)


@pytest.mark.parametrize("points", SIZES)
def test_permutations(points: int) -> None:
    """Random ones, and the bit reversal, exactly: nothing but zeros and ones."""
    rng = np.random.default_rng(points)
    text = [f"{place:b}".zfill(points.bit_length() - 1) for place in range(points)]
    reversal = np.array([int(digits[::-1], 2) for digits in text])
    for order in (reversal, *(rng.permutation(points) for _ in range(5))):
        dense = transforms.permutation(order).dense().numpy()
        np.testing.assert_array_equal(dense, np.eye(points)[order])


@pytest.mark.parametrize("points", [0, 1, 6, 12])
def test_only_powers_of_two(points: int) -> None:
    for make, _ in FIXED.values():
        with pytest.raises(UserError, match=f"{points} values"):
            make(points)
    with pytest.raises(UserError, match=f"{points} values"):
        transforms.circulant(np.ones(points))
    with pytest.raises(UserError, match=f"{points} values"):
        transforms.permutation(np.arange(points))
    with pytest.raises(UserError, match="each of them once"):
        transforms.permutation([0, 1, 1, 3])


def test_models_of_such_layers_become_dense() -> None:
    """By their description too, as a file has it; only moments and projections are refused."""
    first = ButterflyLinear(12, 16, permutation="bit_reversal", expansion=2, complex_pairs=True)
    model = nn.Sequential(first, KaleidoscopeLinear(16, 8, width=2))
    x = flow.randn(3, 12)
    expected = model(x).numpy()
    found = structured_layers(model)
    assert layers_from_json(layers_to_json(found)) == found
    with pytest.raises(UserError, match="cannot take the optimizer's state"):
        SparseToDense(0.5).outlook(SimpleNamespace(model=model))
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="densify_model"):
        find_layers(weights)
    moments = {"exp_avg/0.factors": weights["0.factors"]}
    with pytest.raises(UserError, match="its moments are known"):
        densify_training_state(weights, moments, found)
    densify_model(model)
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]
    assert_close(model(x).numpy(), expected, reduced=32)
    with pytest.raises(UserError, match="nearest butterfly factors"):
        project_model(model, {"_target_": "kaleidoscope", "expansion": 1}, include="1")
