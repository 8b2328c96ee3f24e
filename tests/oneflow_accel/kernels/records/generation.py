"""What a step of generation calls: linear layers of weights in panels, attention over pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneflow_accel.kernels.generation import new_pages, packed_linear, paged_attention

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Record, case

CPU = flow.device("cpu")


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float) -> np.ndarray:
    """Of the last tokens of one sequence, (n, heads, size), to those up to each, (T, kv, size), as
    (n, heads size)."""
    key, value = (np.repeat(each, query.shape[1] // each.shape[1], axis=1) for each in (key, value))
    scores = scale * np.einsum("qhd,khd->hqk", query, key)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1 + len(key) - len(query))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


def _panels(outputs: int, inputs: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Of float32 weights (outputs, inputs), each a word."""

    def make(generator: np.random.Generator) -> np.ndarray:
        weight = generator.standard_normal((outputs, inputs)).astype(np.float32)
        return np.ascontiguousarray(weight.reshape(-1, 64, inputs).swapaxes(1, 2)).view(np.int32)

    return make


def _call_linear(
    x: flow.Tensor, panels: flow.Tensor, bias: flow.Tensor, residual: flow.Tensor
) -> flow.Tensor:
    settings: dict[str, Any] = {"values": 1, "activation": "", "norm": "", "epsilon": 0.0}
    tensors = (x, panels, None, bias, residual, None, None)
    return packed_linear(*tensors, outputs=residual.shape[1], **settings)


def _linear(
    x: np.ndarray, panels: np.ndarray, bias: np.ndarray, residual: np.ndarray
) -> np.ndarray:
    weight = panels.view(np.float32).swapaxes(1, 2).reshape(-1, x.shape[1])
    return (x @ weight.T + bias)[:, : residual.shape[1]] + residual


def _call_attention(
    qkv: flow.Tensor, tables: flow.Tensor, heads: int, shared: int, size: int
) -> flow.Tensor:
    count = {"dtype": flow.int32}
    return paged_attention(
        *(qkv, *new_pages(tables.shape[1], shared, size, "float32", CPU), tables),
        *(flow.zeros(len(qkv), **count), flow.arange(len(qkv), **count), None, None, None),
        heads=heads,
        scale=0.3,
        interleaved=False,
    )


def _attention(
    qkv: np.ndarray, tables: np.ndarray, heads: int, shared: int, size: int
) -> np.ndarray:
    parts = qkv.reshape(len(qkv), heads + 2 * shared, size)
    return attention(*np.split(parts, [heads, heads + shared], axis=1), scale=0.3)


def _backwards(count: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda _: np.arange(count, dtype=np.int32)[None, ::-1].copy()


RECORDS = [
    Record(
        "packed_linear",
        ("oneflow_accel_packed_linear",),
        _call_linear,
        _linear,
        [
            case("one row", (1, 96), _panels(128, 96), (128,), (1, 128), reduced=96),
            case("rows", (13, 200), _panels(192, 200), (192,), (13, 130), reduced=200),
        ],
    ),
    Record(
        "paged_attention",
        ("oneflow_accel_paged_attention",),
        _call_attention,
        _attention,
        [
            case("one page", (3, 3 * 4 * 16), _backwards(1), heads=4, shared=4, size=16),
            case("pages", (150, 10 * 24), _backwards(3), heads=6, shared=2, size=24, reduced=4),
        ],
    ),
]
