"""Packed linear layers and attention over pages in float64 NumPy."""

from __future__ import annotations

import math
from contextlib import nullcontext

from oneflow_accel.kernels import generation
from oneflow_accel.kernels.generation import Norm, PackedLinear, new_pages, paged_attention
from oneflow_accel.kernels.registry import disabled

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import as_array, as_held, random
from tests.oneflow_accel.kernels.records.generation import attention
from tests.tolerances import TOLERANCES, Tolerance, assert_close

CPU = flow.device("cpu")
DTYPES = ["float32", "bfloat16", "int8"]
# Rows, inputs, outputs: of a whole panel and not, of whole groups and not.
SHAPES = [(1, 64, 64), (3, 100, 130), (9, 33, 70), (2, 768, 10)]
ACTIVATIONS = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "swiglu": lambda x: (h := np.split(x, 2, -1))[0] / (1 + np.exp(-h[0])) * h[1],
}
# The operator, or what runs where there is none, with the panels and without.
ways = pytest.mark.parametrize("way", ["chosen", "reference", "plain"])


def whole_numbers(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of 8 bits, and their scale."""
    largest = abs(x).max(-1, keepdims=True)
    safe = np.where(largest == 0, 1, largest)
    return np.rint(x * (127 / safe)), largest / 127


def product(x: np.ndarray, weight: np.ndarray, dtype: str) -> np.ndarray:
    """x weight^T, float64, of what is left of both."""
    if dtype != "int8":
        return as_held(x, dtype).astype(np.float64) @ as_held(weight, dtype).astype(np.float64).T
    missing = -x.shape[1] % 64
    x, weight = (np.pad(each, ((0, 0), (0, missing))) for each in (x, weight))
    rows, by_group = whole_numbers(x.reshape(len(x), -1, 64))
    columns, by_row = whole_numbers(weight)
    sums = np.einsum("rgi,ogi->rog", rows, columns.reshape(len(weight), -1, 64))
    return (sums * by_group[:, None, :, 0]).sum(-1) * by_row[:, 0]


def linear(
    way: str, weight: np.ndarray, bias: np.ndarray | None, dtype: str, activation: str
) -> PackedLinear:
    settings = {"gate": True} if activation == "swiglu" else {"activation": activation}
    if way != "reference":
        with disabled("packed_linear") if way == "plain" else nullcontext():
            return PackedLinear(weight, bias, dtype, CPU, **settings)
    # As if there were an operator, which is not called.
    chosen = generation.packed_linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen, "choose", lambda *_: lambda *a, **kw: chosen.reference(*a, **kw))
        return PackedLinear(weight, bias, dtype, CPU, **settings)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_linear(shape: tuple[int, int, int], dtype: str, way: str) -> None:
    rows, inputs, outputs = shape
    x, weight, bias = random(rows, inputs), random(outputs, inputs, seed=1), random(outputs)
    # A group and an output of nothing but 0.
    x[0, :64] = weight[1] = 0
    for activation, formula in ACTIVATIONS.items():
        expected = formula(product(x, weight, dtype) + bias)
        residual = random(*expected.shape, seed=2)
        layer = linear(way, weight, bias, dtype, activation)
        found = layer(flow.tensor(x), flow.tensor(residual)).numpy()
        # A product of two swings more than its factors.
        assert_close(found, expected + residual, reduced=inputs * (4 if activation else 1))
        plain = linear(way, weight, None, dtype, activation)(flow.tensor(x)).numpy()
        assert_close(plain, formula(product(x, weight, dtype)), reduced=4 * inputs)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_norm_before_a_product(kind: str, dtype: str, way: str) -> None:
    x, weight = 3 * random(5, 96), random(40, 96, seed=1)
    scale, bias, epsilon = random(96), random(96, seed=2) if kind == "layer" else None, 1e-3
    wide = x.astype(np.float64)
    mean = wide.mean(-1, keepdims=True) if kind == "layer" else 0
    normed = (wide - mean) / np.sqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + epsilon) * scale
    expected = product((normed + (0 if bias is None else bias)).astype(np.float32), weight, dtype)
    norm = Norm(kind, flow.tensor(scale), None if bias is None else flow.tensor(bias), epsilon)
    found = linear(way, weight, None, dtype, "")(flow.tensor(x), norm=norm).numpy()
    # Where the norm's last bit decides how a number is rounded.
    loose = {"float32": TOLERANCES["float32"], "bfloat16": Tolerance(1e-3, 1e-3)}
    most = loose.get(dtype, Tolerance(1e-2, 1e-2))
    assert_close(found, expected, reduced=96, override=most, reason="numbers on the border")


@pytest.mark.skipif(bool(generation._linear.missing_reasons()), reason="no such operator")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_others(dtype: str) -> None:
    """Of packed layers, and of attention to pages."""
    x, layer = random(131, 200), PackedLinear(random(100, 200), random(100), dtype, CPU)
    norm = Norm("rms", flow.tensor(random(200)), None, 1e-5)
    expected = layer(flow.tensor(x), norm=norm).numpy()
    kind = "float32" if dtype == "float32" else "bfloat16"
    tables = flow.tensor(np.arange(131, dtype=np.int32)[:, None])
    contexts = []
    for count in (131, 1, 2, 7, 32, 97):
        found = layer(flow.tensor(x[:count]), norm=norm).numpy()
        np.testing.assert_array_equal(found, expected[:count])
        pages = new_pages(131, 2, 25, kind, CPU)
        for place in range(3):
            index = (
                flow.arange(count, dtype=flow.int32),
                flow.full((count,), place, dtype=flow.int32),
            )
            context = paged_attention(
                *(flow.tensor(x[:count]), *pages, tables[:count], *index, None, None, None),
                heads=4,
                scale=0.2,
                interleaved=False,
            )
        contexts.append(context.numpy())
        np.testing.assert_array_equal(contexts[-1], contexts[0][:count])


def rotated(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    size = x.shape[-1]
    index = np.arange(size).reshape(-1, 2) if interleaved else np.arange(size).reshape(2, -1).T
    pairs = x[..., index[:, 0]] + 1j * x[..., index[:, 1]]
    turned = pairs * np.exp(1j * angles)[:, None, :]
    result = np.empty_like(x)
    result[..., index[:, 0]], result[..., index[:, 1]] = turned.real, turned.imag
    return result


@pytest.mark.parametrize("way", ["chosen", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("turned", [None, False, True])
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 4, 16), (6, 2, 24)])
def test_paged_attention(
    heads: int, shared: int, size: int, turned: bool | None, dtype: str, way: str
) -> None:
    """Three sequences grow by chunks and by tokens; the third is a copy of the first one's page."""
    rng = np.random.default_rng(0)
    keys, values = new_pages(9, shared, size, dtype, CPU)
    tables = np.array([[5, 2, 7], [8, -1, -1], [1, -1, -1]], np.int32)
    past: list[list[np.ndarray]] = [[], [], []]
    for counts in ((63, 1, 0), (3, 0, 0), (1, 60, 0), (70, 2, 3)):
        copies = None
        if counts[2]:
            copies, past[2] = np.array([[8, 1]], np.int32), list(past[1])
        total, rows = sum(counts), np.repeat(np.arange(3), counts)
        qkv = rng.standard_normal((total, heads + 2 * shared, size)).astype(np.float32)
        places = np.concatenate(
            [len(held) + np.arange(count) for held, count in zip(past, counts, strict=True)]
        )
        angles = places[:, None] * 0.1 ** (np.arange(size // 2) / size)
        wide = qkv.astype(np.float64)
        if turned is not None:
            mixed = wide[:, : heads + shared]
            wide[:, : heads + shared] = rotated(mixed, angles, turned)
        expected = []
        for token, row in zip(wide, rows, strict=True):
            held = as_held(token[heads:].astype(np.float32), dtype).astype(np.float64)
            past[row].append(held)
            own = np.split(np.stack(past[row]), [shared], axis=1)
            expected.append(attention(token[None, :heads], *own, scale=0.3)[0])
        numbers = [tables, rows.astype(np.int32), places.astype(np.int32), copies]
        if turned is not None:
            numbers += [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
        else:
            numbers += [None, None]
        run = paged_attention if way == "chosen" else paged_attention.reference
        found = run(
            flow.tensor(qkv.reshape(total, -1)),
            *(keys, values),
            *(None if array is None else flow.tensor(array) for array in numbers),
            heads=heads,
            scale=0.3,
            interleaved=bool(turned),
        )
        # Queries and weights may be rounded as well.
        assert_close(found.numpy(), np.stack(expected), dtype=dtype, reduced=4)
    # What was written is there, rounded, in its page.
    written = np.stack(past[0])[64:128]
    np.testing.assert_allclose(
        as_array(keys)[2].transpose(2, 0, 1)[: len(written)], written[:, :shared], atol=2e-2
    )
