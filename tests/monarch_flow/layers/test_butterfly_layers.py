"""Butterfly and kaleidoscope layers against dense float64 factors, and what they refuse."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import ButterflyLinear, KaleidoscopeLinear, LinearConfig, StructuredLinear
from monarch_flow.layers.butterfly import input_order
from tests.oneflow_accel.kernels.harness import Forward
from tests.tolerances import assert_close

BUTTERFLY, COMPLEX = {"_target_": "butterfly"}, {"complex_pairs": True}
REVERSED = {**BUTTERFLY, "permutation": "bit_reversal"}
KALEIDOSCOPE = {"_target_": "kaleidoscope"}
LAYERS = {
    "butterfly": BUTTERFLY,
    "complex": {**REVERSED, **COMPLEX},
    "real part": {**BUTTERFLY, **COMPLEX, "permutation": "mirrored_bit_reversal", "expansion": 2},
    "kaleidoscope": KALEIDOSCOPE,
    "wide": {**KALEIDOSCOPE, "width": 2, "expansion": 4},
    "complex kaleidoscope": {**KALEIDOSCOPE, **COMPLEX, "expansion": 2},
}
SIZES = [(16, 16), (16, 7), (5, 16)]


def built(name: str, size: tuple[int, int], **more: Any) -> StructuredLinear:
    return LinearConfig.of({**LAYERS[name], **more}).build(*size, dtype=flow.float64)


def place_of(factors: np.ndarray, level: int) -> np.ndarray:
    """The dense factor of one size of blocks, entry by entry."""
    half, points = 2**level, 2 * factors.shape[-1]
    dense = np.zeros((points, points), factors.dtype)
    for first in range(0, points, 2 * half):
        for j in range(half):
            pair = [first + j, first + half + j]
            dense[np.ix_(pair, pair)] = factors[:, :, first // 2 + j]
    return dense


def dense_of(layer: StructuredLinear, order: np.ndarray) -> np.ndarray:
    """The product of the factors' dense matrices, as the papers define it."""
    values = layer.factors.numpy()
    values = values[:, :, 0] + 1j * values[:, :, 1] if values.shape[2] == 2 else values[:, :, 0]
    product = np.eye(len(order))[order].astype(values.dtype)
    for number, factors in enumerate(values):
        shrinks = isinstance(layer, KaleidoscopeLinear) and number % 2 == 0
        levels = range(len(factors))
        for level in reversed(levels) if shrinks else levels:
            product = place_of(factors[level], level) @ product
    if np.iscomplexobj(product):
        product = np.block([[product.real, -product.imag], [product.imag, product.real]])
    return product[: layer.out_features, : layer.in_features]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_product_of_dense_factors(name: str, size: tuple[int, int]) -> None:
    """Forward on any number of axes, also in float32; gradients of the input and the bias."""
    layer = built(name, size)
    order = input_order(layer.permutation, layer.points)
    matrix, bias = dense_of(layer, order), layer.bias.numpy()
    assert_close(layer.dense().numpy(), matrix, dtype="float64", reduced=16)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, size[0]))
    given = flow.tensor(x, requires_grad=True)
    y = layer(given)
    assert_close(y.numpy(), x @ matrix.T + bias, dtype="float64", reduced=16)
    single = layer(flow.tensor(x[1, 2])).numpy()
    assert_close(single, x[1, 2] @ matrix.T + bias, dtype="float64", reduced=16)
    y_grad = rng.standard_normal(y.shape)
    y.backward(flow.tensor(y_grad))
    assert_close(given.grad.numpy(), y_grad @ matrix, dtype="float64", reduced=16)
    assert_close(layer.bias.grad.numpy(), y_grad.sum((0, 1)), dtype="float64", reduced=6)
    narrow = layer.to(flow.float32)(flow.tensor(x.astype(np.float32))).numpy()
    assert_close(narrow, x @ matrix.T + bias, reduced=64)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_the_factors(name: str) -> None:
    """Along random directions, against central differences of the dense product."""
    layer = built(name, (8, 6), bias=False)
    order = input_order(layer.permutation, layer.points)
    rng = np.random.default_rng(1)
    x, y_grad = rng.standard_normal((5, 8)), rng.standard_normal((5, 6))
    (layer(flow.tensor(x)) * flow.tensor(y_grad)).sum().backward()
    gradient, start = layer.factors.grad.numpy(), layer.factors.numpy().copy()
    for _ in range(3):
        direction = rng.standard_normal(start.shape)
        losses = []
        for sign in (1, -1):
            with flow.no_grad():
                layer.factors.copy_(flow.tensor(start + sign * 1e-5 * direction))
            losses.append((x @ dense_of(layer, order).T * y_grad).sum())
        difference = (losses[0] - losses[1]) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_graph_and_global_tensors(name: str) -> None:
    layer = built(name, (16, 12))
    x = flow.randn(4, 16, dtype=flow.float64)
    expected = layer(x).numpy()

    assert_close(Forward(layer)(x).numpy(), expected, dtype="float64", reduced=16)
    placement = flow.placement("cpu", [0])
    layer.to_global(placement, flow.sbp.broadcast)
    y = layer(x.to_global(placement, flow.sbp.split(0)))
    assert_close(y.numpy(), expected, dtype="float64", reduced=16)


def test_counts_start_and_state() -> None:
    """2 n log2(n) weights of a butterfly matrix (Dao et al. 2019); N(0, 1/2) to start with."""
    flow.manual_seed(0)
    layer = ButterflyLinear(1024, 1024)
    assert layer.factors.numel() == layer.macs_per_row() == 2 * 1024 * 10
    assert layer.saving == 20 / 1024
    np.testing.assert_allclose(layer.factors.numpy().std(), 0.5**0.5, rtol=0.02)
    assert sorted(layer.state_dict()) == ["bias", "factors"]
    pairs = KaleidoscopeLinear(64, 64, width=2, complex_pairs=True)
    # Of 32 complex values; a complex product is four real ones.
    assert pairs.factors.numel() == 2 * 4 * 32 * 5 * 2
    assert pairs.macs_per_row() == 2 * pairs.factors.numel()
    np.testing.assert_allclose(pairs.factors.numpy().std(), 0.5, rtol=0.05)
    layer.reset_dense_init(nn.init.zeros_)
    assert layer.factors.numpy().any()


@pytest.mark.parametrize(
    ("config", "size", "text"),
    [
        (BUTTERFLY, (24, 24), "24 -> 24 with expansion 1 has 24"),
        (BUTTERFLY, (1, 1), "at least 2"),
        (KALEIDOSCOPE, (16, 24), "16 -> 24"),
        ({**KALEIDOSCOPE, **COMPLEX}, (2, 2), "at least 4"),
        ({**KALEIDOSCOPE, "expansion": 3}, (16, 16), "has 48"),
        ({**KALEIDOSCOPE, "width": 0}, (16, 16), "width is 0"),
        ({**BUTTERFLY, "permutation": "dct"}, (16, 16), "'dct'"),
    ],
)
def test_what_it_refuses(config: dict[str, Any], size: tuple[int, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        LinearConfig.of(config).build(*size)
