"""A GPT-2 block on one token in float64 NumPy (Radford et al. 2019, 2.3; Vaswani et al. 2017)."""

from __future__ import annotations

import math

from oneflow_accel.kernels.linear import decoder_layer

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import needs_plugin
from tests.tolerances import assert_close

SETTINGS = {"scale": 0.3, "epsilon": 1e-5}
# Batch, heads, tokens before, head size, inner width. More rows than the kernel for few rows takes.
SHAPES = [(1, 4, 5, 16, 128), (3, 4, 0, 16, 100), (8, 2, 17, 24, 96), (12, 3, 300, 8, 40)]


def arrays(batch: int, heads: int, past: int, size: int, inner: int) -> list[np.ndarray]:
    width = heads * size
    shapes = [
        (batch, 1, width),
        *[(batch, heads, past, size)] * 2,
        *[(width,)] * 2,
        *[(3 * width, width), (3 * width,)],
        *[(width, width), (width,)],
        *[(width,)] * 2,
        *[(inner, width), (inner,)],
        *[(width, inner), (width,)],
    ]
    generator = np.random.default_rng(0)
    return [(0.4 * generator.standard_normal(shape)).astype(np.float32) for shape in shapes]


def tensors(inputs: list[np.ndarray]) -> list[flow.Tensor]:
    return [flow.tensor(array) for array in inputs]


def norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    variance = x.var(-1, keepdims=True)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + SETTINGS["epsilon"]) * weight + bias


def gelu(x: np.ndarray, tanh: bool) -> np.ndarray:
    if tanh:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def expected(inputs: list[np.ndarray], tanh: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, keys, values, *w = (array.astype(np.float64) for array in inputs)
    batch, heads, _, size = keys.shape
    mixed = (norm(x, w[0], w[1]) @ w[2].T + w[3]).reshape(batch, heads, 1, 3, size)
    query, key, value = np.moveaxis(mixed, 3, 0)
    keys, values = np.concatenate([keys, key], 2), np.concatenate([values, value], 2)
    scores = SETTINGS["scale"] * query @ np.swapaxes(keys, 2, 3)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = weights / weights.sum(-1, keepdims=True) @ values
    x = x + context.reshape(batch, 1, -1) @ w[4].T + w[5]
    return x + gelu(norm(x, w[6], w[7]) @ w[8].T + w[9], tanh) @ w[10].T + w[11], keys, values


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_more_token(shape: tuple[int, ...], tanh: bool) -> None:
    inputs = arrays(*shape)
    found = decoder_layer(*tensors(inputs), **SETTINGS, tanh=tanh)
    for actual, reference in zip(found, expected(inputs, tanh), strict=True):
        assert_close(actual.numpy(), reference, reduced=shape[-1])


@needs_plugin
def test_in_a_graph() -> None:
    inputs = tensors(arrays(*SHAPES[0]))

    class Graph(nn.Graph):
        def build(self, *inputs: flow.Tensor) -> tuple[flow.Tensor, ...]:
            return decoder_layer(*inputs, **SETTINGS, tanh=True)

    eager = decoder_layer(*inputs, **SETTINGS, tanh=True)
    for found, reference in zip(Graph()(*inputs), eager, strict=True):
        np.testing.assert_array_equal(found.numpy(), reference.numpy())


@needs_plugin
def test_no_sequences() -> None:
    inputs = arrays(1, 4, 5, 16, 128)
    for index in range(3):
        inputs[index] = inputs[index][:0]
    y, keys, _ = decoder_layer(*tensors(inputs), **SETTINGS, tanh=True)
    assert tuple(y.shape) == (0, 1, 64)
    assert tuple(keys.shape) == (0, 4, 6, 16)


@needs_plugin
@pytest.mark.parametrize(("index", "name"), [(5, "qkv_weight"), (10, "post_norm_bias")])
def test_wrong_shapes_are_named(index: int, name: str) -> None:
    inputs = arrays(*SHAPES[0])
    inputs[index] = inputs[index][:-1]
    with pytest.raises(RuntimeError, match=name):
        decoder_layer(*tensors(inputs), **SETTINGS, tanh=True)


def gradients(inputs: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Of all inputs, and the result."""
    leaves = [flow.tensor(array, requires_grad=True) for array in inputs]
    y, keys, values = decoder_layer(*leaves, **SETTINGS, tanh=True)
    (y.sum() + (keys * keys).sum() + values.sum()).backward()
    return [leaf.grad.numpy() for leaf in leaves], y.detach().numpy()


def test_its_reference_runs_where_a_gradient_is_asked_for() -> None:
    inputs = arrays(*SHAPES[0])
    found, y = gradients(inputs)
    assert_close(y, expected(inputs, True)[0], reduced=SHAPES[0][-1])
    # One element of each argument moved, in float64.
    for i in range(len(inputs)):
        sums = []
        for step in (1e-4, -1e-4):
            moved = [array.astype(np.float64) for array in inputs]
            moved[i].flat[1] += step
            results = expected(moved, True)
            sums.append(results[0].sum() + (results[1] ** 2).sum() + results[2].sum())
        derivative = (sums[0] - sums[1]) / 2e-4
        np.testing.assert_allclose(found[i].flat[1], derivative, rtol=1e-3, atol=1e-3)
