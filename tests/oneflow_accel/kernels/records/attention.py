"""Scaled dot-product attention, of separate tensors and of one packed projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from oneflow_accel.kernels.attention import packed_attention, scaled_dot_product_attention
from oneflow_accel.kernels.weight_dropout import kept_weights

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Layout, Record, case


def _seen(q: np.ndarray, k: np.ndarray, causal: bool) -> np.ndarray:
    """Which keys each query sees."""
    queries, keys = q.shape[-2], k.shape[-2]
    i, j = np.arange(queries)[:, None], np.arange(keys)
    return (j <= i + keys - queries) | (not causal)


def _probabilities(q: np.ndarray, k: np.ndarray, causal: bool, scale: float) -> np.ndarray:
    seen = _seen(q, k, causal)
    scores = np.where(seen, scale * q @ k.swapaxes(-2, -1), -np.inf)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    # 0 also in a row that NaN is in.
    return np.where(seen, exponentials / exponentials.sum(axis=-1, keepdims=True), 0.0)


def _scale(scale: float | None, dim: int) -> float:
    return dim**-0.5 if scale is None else scale


def _spread(x: np.ndarray, heads: int) -> np.ndarray:
    """Keys or values of each query head."""
    return x if x.shape[1] == heads else np.repeat(x, heads // x.shape[1], axis=1)


def _gathered(x: np.ndarray, heads: int) -> np.ndarray:
    """The sum over the query heads that share one of keys and values."""
    if x.shape[1] == heads:
        return x
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2)


def _factors(p: np.ndarray, dropout: float, seed: int) -> np.ndarray | float:
    """Of the probabilities: 0 where one is dropped."""
    return kept_weights(seed, p.shape, dropout) / (1 - dropout) if dropout else 1.0


# Lengths of the sequences that are packed in each row.
Lengths = tuple[tuple[int, ...], ...]


def _by_sequence(
    of_one: Callable[..., tuple[np.ndarray, ...]],
    arrays: tuple[np.ndarray, ...],
    lengths: Lengths,
    dropout: float = 0.0,
    seed: int = 0,
    **attributes: Any,
) -> tuple[np.ndarray, ...]:
    """Each sequence by itself, as if there were no other; its keys begin at 0 for dropout."""
    rows, heads, time = arrays[0].shape[:3]
    kept = kept_weights(seed, (rows, heads, time, time), dropout) / (1 - dropout)
    found = []
    for row, counts in enumerate(lengths):
        begins = np.cumsum((0, *counts))
        parts = []
        for begin, end in pairwise(begins):
            own = (x[row : row + 1, :, begin:end] for x in arrays)
            factors = kept[row : row + 1, :, begin:end, : end - begin]
            parts.append(of_one(*own, factors=factors, **attributes))
        found.append([np.concatenate(each, axis=2) for each in zip(*parts, strict=True)])
    return tuple(np.concatenate(each) for each in zip(*found, strict=True))


def _reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    lengths: Lengths = (),
    factors: np.ndarray | None = None,
) -> np.ndarray:
    if lengths:
        attributes = {"causal": causal, "scale": scale, "dropout": dropout, "seed": seed}
        one = lambda *qkv, **rest: (_reference(*qkv, **rest),)  # noqa: E731
        return _by_sequence(one, (q, k, v), lengths, **attributes)[0]
    k, v = (_spread(x, q.shape[1]) for x in (k, v))
    p = _probabilities(q, k, causal, _scale(scale, q.shape[-1]))
    return (p * (_factors(p, dropout, seed) if factors is None else factors)) @ v


def _gradient(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    lengths: Lengths = (),
    factors: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    if lengths:
        attributes = {"causal": causal, "scale": scale, "dropout": dropout, "seed": seed}
        return _by_sequence(_gradient, (dy, q, k, v), lengths, **attributes)
    factor, kv_heads = _scale(scale, q.shape[-1]), k.shape[1]
    k, v = (_spread(x, q.shape[1]) for x in (k, v))
    p = _probabilities(q, k, causal, factor)
    kept = _factors(p, dropout, seed) if factors is None else factors
    dp = dy @ v.swapaxes(-2, -1) * kept
    ds = factor * p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    ds = np.where(_seen(q, k, causal), ds, 0.0)
    dk, dv = ds.swapaxes(-2, -1) @ q, (p * kept).swapaxes(-2, -1) @ dy
    return ds @ k, _gathered(dk, kv_heads), _gathered(dv, kv_heads)


def _parts(qkv: np.ndarray, num_heads: int) -> list[np.ndarray]:
    dim = int(np.prod(qkv.shape[2:])) // (3 * num_heads)
    parts = qkv.reshape(*qkv.shape[:2], 3, num_heads, dim).transpose(2, 0, 3, 1, 4)
    return [parts[0], parts[1], parts[2]]


def _packed_reference(qkv: np.ndarray, num_heads: int, **attributes: Any) -> np.ndarray:
    out = _reference(*_parts(qkv, num_heads), **attributes)
    return out.transpose(0, 2, 1, 3).reshape(*qkv.shape[:2], num_heads * out.shape[-1])


def _packed_gradient(
    dy: np.ndarray, qkv: np.ndarray, num_heads: int, **attributes: Any
) -> tuple[np.ndarray]:
    dim = dy.shape[2] // num_heads
    out_grad = dy.reshape(*dy.shape[:2], num_heads, dim).transpose(0, 2, 1, 3)
    gradients = _gradient(out_grad, *_parts(qkv, num_heads), **attributes)
    return (np.stack(gradients).transpose(1, 3, 0, 2, 4).reshape(qkv.shape),)


def _large(generator: np.random.Generator) -> np.ndarray:
    """Scores of some hundreds: their exponentials overflow unless the largest is taken away."""
    return 4.0 * generator.standard_normal((1, 2, 70, 16))


def _optional(like: flow.Tensor, seed: int | None, lengths: Lengths) -> dict[str, flow.Tensor]:
    """The seed and the segments that there are; segments are numbers that grow, not by 1 only."""
    arrays = {} if seed is None else {"seed": np.array([seed])}
    if lengths:
        rows = [np.repeat(3 * np.arange(len(counts)), counts) for counts in lengths]
        arrays["segments"] = np.stack(rows)
    if like.is_global:
        place = {"placement": like.placement, "sbp": [flow.sbp.broadcast] * len(like.sbp)}
    else:
        place = {"device": like.device}
    return {name: flow.tensor(x, dtype=flow.int64, **place) for name, x in arrays.items()}


def _call(
    q: flow.Tensor,
    k: flow.Tensor,
    v: flow.Tensor,
    seed: int | None = None,
    lengths: Lengths = (),
    **attributes: Any,
) -> flow.Tensor:
    return scaled_dot_product_attention(q, k, v, **_optional(q, seed, lengths), **attributes)


def _packed_call(
    qkv: flow.Tensor,
    num_heads: int,
    seed: int | None = None,
    lengths: Lengths = (),
    **attributes: Any,
) -> flow.Tensor:
    return packed_attention(qkv, num_heads, **_optional(qkv, seed, lengths), **attributes)


def _self_attention(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (shape, shape, shape)


def _queries_and_keys(
    queries: int, keys: int, batch: int = 2, heads: int = 2, dim: int = 8, kv_heads: int = 0
) -> tuple[tuple[int, ...], ...]:
    of_keys = (batch, kv_heads or heads, keys, dim)
    return ((batch, heads, queries, dim), of_keys, of_keys)


_LAYOUTS = [
    Layout(inputs=("B", "B", "B"), output="B"),
    Layout(inputs=("S(0)", "S(0)", "S(0)"), output="S(0)"),
    Layout(inputs=("S(1)", "S(1)", "S(1)"), output="S(1)"),
]
_PACKED_LAYOUTS = [
    Layout(inputs=("B",), output="B"),
    Layout(inputs=("S(0)",), output="S(0)"),
    Layout(inputs=("S(3)",), output="S(2)"),
]
_attention = partial(
    Record,
    operators=("oneflow_accel_attention", "oneflow_accel_attention_grad"),
    call=_call,
    not_finite=Strictness.REGROUPED,
    reference=_reference,
    gradient=_gradient,
    layouts=_LAYOUTS,
    dtypes=("float32", "bfloat16"),
)
_packed = partial(
    _attention,
    operators=("oneflow_accel_packed_attention", "oneflow_accel_packed_attention_grad"),
    call=_packed_call,
    reference=_packed_reference,
    gradient=_packed_gradient,
    layouts=_PACKED_LAYOUTS,
)

RECORDS = [
    _attention(
        name="scaled_dot_product_attention",
        cases=[
            case("one", *_self_attention((1, 1, 1, 1))),
            case("odd", *_self_attention((2, 3, 7, 5)), reduced=7),
            case("odd causal", *_self_attention((2, 3, 7, 5)), causal=True, reduced=7),
            case("no batch", *_self_attention((0, 3, 7, 5))),
            case("no query", *_queries_and_keys(0, 5)),
            case("one query", *_queries_and_keys(1, 33), causal=True, reduced=33),
            case("one long query", *_queries_and_keys(1, 531, dim=19), reduced=531),
            case("two queries", *_queries_and_keys(2, 5), causal=True, reduced=5),
            case("cache", *_queries_and_keys(5, 71), causal=True, scale=0.3, reduced=71),
            case("more queries", *_queries_and_keys(131, 3), reduced=131),
            case("wide", *_queries_and_keys(50, 67, heads=1, dim=129), reduced=129),
            case("large scores", _large, _large, _large, scale=1.0, reduced=400),
            # Above the blocks of queries and keys of both directions, by a little.
            case("blocks", *_queries_and_keys(290, 301, 1, 2, 64), reduced=301),
            case("blocks causal", *_queries_and_keys(290, 301, 1, 2, 17), causal=True, reduced=301),
            case("threads", *_self_attention((3, 5, 65, 33)), causal=True, reduced=65),
            case("global", *_queries_and_keys(6, 9, 2, 4, 3), causal=True, reduced=9),
        ],
    ),
    _attention(
        name="grouped_query_attention",
        cases=[
            case("odd", *_queries_and_keys(7, 9, 2, 6, 5, kv_heads=2), causal=True, reduced=27),
            case("one head of keys", *_queries_and_keys(7, 9, 2, 5, 3, kv_heads=1), reduced=45),
            case("no query", *_queries_and_keys(0, 5, heads=4, kv_heads=2)),
            case("one query", *_queries_and_keys(1, 531, 2, 4, 19, kv_heads=2), reduced=531),
            # Threads share the queries of one head.
            case("blocks", *_queries_and_keys(290, 301, 1, 4, 33, kv_heads=2), reduced=602),
            case("global", *_queries_and_keys(6, 9, 2, 8, 3, kv_heads=4), causal=True, reduced=18),
        ],
    ),
    _attention(
        name="attention_with_dropout",
        cases=[
            case("odd", *_self_attention((2, 3, 7, 5)), dropout=0.4, seed=-5, reduced=7),
            case("one query", *_queries_and_keys(1, 531, dim=19), dropout=0.1, seed=1, reduced=531),
            case(
                "grouped",
                *_queries_and_keys(290, 301, 1, 4, 17, kv_heads=2),
                causal=True,
                dropout=0.2,
                seed=2**61 + 3,
                reduced=602,
            ),
            case("much", *_queries_and_keys(131, 333), dropout=0.9, seed=0, reduced=700),
            case(
                "global",
                *_queries_and_keys(6, 9, 2, 8, 3, kv_heads=4),
                causal=True,
                dropout=0.5,
                seed=7,
                reduced=18,
            ),
        ],
    ),
    _attention(
        name="attention_of_packed_sequences",
        cases=[
            case("odd", *_self_attention((2, 3, 7, 5)), lengths=((3, 4), (1, 6)), reduced=7),
            case("ones", *_self_attention((1, 2, 3, 4)), causal=True, lengths=((1, 1, 1),)),
            # Above the blocks of queries and keys of both directions, by a little.
            case(
                "blocks",
                *_queries_and_keys(300, 300, 2, 4, 17, kv_heads=2),
                causal=True,
                lengths=((1, 289, 10), (300,)),
                reduced=600,
            ),
            case(
                "dropout",
                *_queries_and_keys(150, 150, 1, 2, 8),
                causal=True,
                dropout=0.2,
                seed=11,
                lengths=((7, 140, 3),),
                reduced=150,
            ),
            case(
                "global",
                *_queries_and_keys(6, 6, 2, 8, 3, kv_heads=4),
                causal=True,
                dropout=0.5,
                seed=7,
                lengths=((2, 4), (5, 1)),
                reduced=18,
            ),
        ],
    ),
    _packed(
        name="packed_attention",
        cases=[
            case("odd", (2, 7, 45), num_heads=3, reduced=7),
            case("odd causal", (2, 7, 45), num_heads=3, causal=True, scale=0.7, reduced=7),
            case("no batch", (0, 7, 45), num_heads=3),
            case("vision", (2, 197, 3, 2, 64), num_heads=2, reduced=197),
            case("language", (1, 256, 3 * 128), num_heads=2, causal=True, reduced=256),
            case("global", (2, 6, 3, 4, 5), num_heads=4, causal=True, reduced=6),
        ],
    ),
    _packed(
        name="packed_attention_with_dropout",
        cases=[
            case("odd", (2, 7, 45), num_heads=3, dropout=0.3, seed=4, reduced=7),
            case("vision", (2, 197, 3, 2, 64), num_heads=2, dropout=0.1, seed=3, reduced=197),
            case(
                "sequences",
                (2, 40, 3, 2, 8),
                num_heads=2,
                causal=True,
                dropout=0.1,
                seed=3,
                lengths=((39, 1), (10, 30)),
                reduced=40,
            ),
            case("global", (2, 6, 3, 4, 5), num_heads=4, dropout=0.5, seed=9, reduced=6),
        ],
    ),
]
