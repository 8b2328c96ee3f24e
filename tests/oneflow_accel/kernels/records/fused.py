"""Fused operators of transformers with nothing dropped out (else test_fused.py), and of tril."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Input, Layout, Record, case

Gradients = tuple["np.ndarray | None", ...]
BOTH = ("float32", "bfloat16")
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _mask(*shape: int) -> Input:
    """Truth values, one in four of them false."""

    def make(generator: np.random.Generator) -> np.ndarray:
        return generator.random(shape) < 0.75

    return make


def _along(axis: int, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return np.asarray(x + bias.reshape([-1 if i == axis else 1 for i in range(x.ndim)]))


def _sum_to(shape: tuple[int, ...], gradient: np.ndarray) -> np.ndarray:
    """The gradient of what was broadcast from `shape`."""
    missing = gradient.ndim - len(shape)
    axes = [i for i in range(gradient.ndim) if i < missing or shape[i - missing] == 1]
    return np.asarray(gradient.sum(axis=tuple(axes), keepdims=True).reshape(shape))


def _bias_gelu(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    z = _along(axis, a, b)
    return np.asarray(0.5 * z * (1 + _erf(z / math.sqrt(2))))


def _bias_gelu_gradient(dy: np.ndarray, a: np.ndarray, b: np.ndarray, axis: int) -> Gradients:
    z = _along(axis, a, b)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    dx = dy * (0.5 * (1 + _erf(z / math.sqrt(2))) + z * density)
    return dx, dx.sum(axis=tuple(i for i in range(a.ndim) if i != axis))


def softmax(z: np.ndarray) -> np.ndarray:
    if not z.size:
        return z
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def softmax_gradient(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(y * (dy - (dy * y).sum(axis=-1, keepdims=True)))


def _masked(x: np.ndarray, mask: np.ndarray, fill_value: float, scale: float) -> np.ndarray:
    return softmax(np.where(mask, x * scale, fill_value))


def _masked_gradient(
    dy: np.ndarray, x: np.ndarray, mask: np.ndarray, fill_value: float, scale: float
) -> Gradients:
    dz = softmax_gradient(dy, _masked(x, mask, fill_value, scale))
    return np.where(mask, dz * scale, 0.0), None


def _biased(
    x: np.ndarray, bias: np.ndarray, mask: np.ndarray, fill_value: float, scale: float
) -> np.ndarray:
    return _masked(x + bias, mask, fill_value, scale)


def _biased_gradient(
    dy: np.ndarray,
    x: np.ndarray,
    bias: np.ndarray,
    mask: np.ndarray,
    fill_value: float,
    scale: float,
) -> Gradients:
    dx, _ = _masked_gradient(dy, x + bias, mask, fill_value, scale)
    assert dx is not None
    return dx, _sum_to(bias.shape, dx), None


def kept_by_tril(x: np.ndarray, diagonal: int) -> np.ndarray:
    """Which elements of the matrices of the last two axes lie on or below the diagonal."""
    return np.broadcast_to(np.tri(x.shape[-2], x.shape[-1], diagonal, dtype=bool), x.shape)


def _scale_tril(x: np.ndarray, diagonal: int, fill_value: float, scale: float) -> np.ndarray:
    return np.where(kept_by_tril(x, diagonal), x * scale, fill_value)


def _scale_tril_gradient(
    dy: np.ndarray, x: np.ndarray, diagonal: int, fill_value: float, scale: float
) -> Gradients:
    return (np.where(kept_by_tril(x, diagonal), dy * scale, 0.0),)


def _tril_softmax(
    x: np.ndarray, diagonal: int, tril_scale_value: float, tril_fill_value: float
) -> np.ndarray:
    return _masked(x, kept_by_tril(x, diagonal), tril_fill_value, tril_scale_value)


def _tril_softmax_gradient(
    dy: np.ndarray, x: np.ndarray, diagonal: int, tril_scale_value: float, tril_fill_value: float
) -> Gradients:
    mask = kept_by_tril(x, diagonal)
    return _masked_gradient(dy, x, mask, tril_fill_value, tril_scale_value)[:1]


def _query_key_value(hidden: np.ndarray, head_size: int) -> list[np.ndarray]:
    """(sequence, batch, heads * 3 * size) to three of (batch, heads, sequence, size)."""
    sequence, batch, _ = hidden.shape
    parts = hidden.reshape(sequence, batch, -1, 3, head_size).transpose(3, 1, 2, 0, 4)
    return list(parts)


def _attention(hidden: np.ndarray, head_size: int, alpha: float) -> np.ndarray:
    query, key, value = _query_key_value(hidden, head_size)
    return np.asarray(alpha * (query @ key.swapaxes(-1, -2)) @ value)


def _attention_gradient(
    dy: np.ndarray, hidden: np.ndarray, head_size: int, alpha: float
) -> Gradients:
    query, key, value = _query_key_value(hidden, head_size)
    product = alpha * (query @ key.swapaxes(-1, -2))
    dproduct = alpha * (dy @ value.swapaxes(-1, -2))
    parts = np.stack(
        [dproduct @ key, dproduct.swapaxes(-1, -2) @ query, product.swapaxes(-1, -2) @ dy]
    )
    return (parts.transpose(3, 1, 2, 0, 4).reshape(hidden.shape),)


def _call_attention(hidden: flow.Tensor, head_size: int, alpha: float) -> flow.Tensor:
    product, value = flow._C.fused_self_attention(hidden, head_size=head_size, alpha=alpha)
    return flow.matmul(product, value)


def _first(function: Callable[..., list[flow.Tensor]]) -> Callable[..., flow.Tensor]:
    return lambda *tensors, **attributes: function(*tensors, training=False, **attributes)[0]


_MASKED_CASES = (
    case("one-column", (3, 1, 2, 1), _mask(3, 1, 2, 1), fill_value=-1e4, scale=1.0),
    case("empty", (0, 2, 3, 5), _mask(0, 1, 3, 5), fill_value=-1e4, scale=1.0),
    case("mask-per-batch", (2, 3, 5, 17), _mask(2, 1, 5, 17), fill_value=-1e4, scale=0.5),
    case("mask-per-head", (2, 3, 5, 17), _mask(2, 3, 5, 17), fill_value=-1e4, scale=1.0),
    case("mask-of-padding", (2, 3, 5, 17), _mask(2, 1, 1, 17), fill_value=-1e4, scale=2.0),
    case("same-mask", (2, 3, 5, 17), _mask(1, 1, 5, 17), fill_value=0.5, scale=1.0),
    case("threads", (2, 12, 67, 129), _mask(2, 1, 67, 129), fill_value=-1e4, scale=0.125),
    case("global", (4, 2, 3, 18), _mask(4, 1, 3, 18), fill_value=-1e4, scale=0.5),
)
_MASKED_LAYOUTS = (Layout(("S(0)", "S(0)"), "S(0)"), Layout(("S(1)", "B"), "S(1)"))

_BIAS_CASES = (
    case("one", (1, 1), (1,), axis=1),
    case("empty", (0, 3), (3,), axis=1),
    case("last-axis", (3, 5, 17), (17,), axis=2, reduced=15),
    case("middle-axis", (3, 5, 17), (5,), axis=1, reduced=51),
    case("first-axis", (7, 3, 11), (7,), axis=0, reduced=33),
    case("threads", (5, 67, 383), (383,), axis=2, reduced=335),
    case("global", (4, 3, 18), (18,), axis=2, reduced=12),
)
_BIAS_LAYOUTS = (Layout(("S(0)", "B"), "S(0)"), Layout(("S(2)", "S(0)"), "S(2)"))

RECORDS: list[Record] = [
    Record(
        name="fused_bias_add_gelu",
        operators=("fused_bias_add_gelu", "fused_bias_add_gelu_grad"),
        call=flow._C.fused_bias_add_gelu,
        reference=_bias_gelu,
        gradient=_bias_gelu_gradient,
        cases=_BIAS_CASES,
        layouts=_BIAS_LAYOUTS,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        name="fused_scale_mask_softmax",
        operators=("fused_scale_mask_softmax", "fused_scale_mask_softmax_grad"),
        call=flow._C.fused_scale_mask_softmax,
        reference=_masked,
        gradient=_masked_gradient,
        cases=_MASKED_CASES,
        layouts=_MASKED_LAYOUTS,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        name="fused_scale_mask_softmax_dropout",
        operators=("fused_scale_mask_softmax_dropout", "fused_scale_mask_softmax_dropout_grad"),
        call=_first(flow._C.fused_scale_mask_softmax_dropout),
        reference=_masked,
        gradient=_masked_gradient,
        cases=_MASKED_CASES,
        layouts=_MASKED_LAYOUTS,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        name="fused_bias_add_scale_mask_softmax_dropout",
        operators=("fused_bias_add_scale_mask_softmax_dropout",),
        call=_first(flow._C.fused_bias_add_scale_mask_softmax_dropout),
        reference=_biased,
        gradient=_biased_gradient,
        cases=(
            case(
                "whole-bias",
                (2, 3, 5, 17),
                (2, 3, 5, 17),
                _mask(2, 1, 5, 17),
                fill_value=-1e4,
                scale=0.5,
            ),
            case(
                "bias-per-head",
                (2, 3, 5, 17),
                (1, 3, 5, 17),
                _mask(2, 3, 5, 17),
                fill_value=-1e4,
                scale=2.0,
                reduced=2,
            ),
            case(
                "one-bias",
                (2, 3, 17),
                (1,),
                _mask(2, 3, 17),
                fill_value=-1e4,
                scale=1.0,
                reduced=102,
            ),
        ),
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        name="fused_scale_tril_softmax",
        operators=(
            "fused_tril_scale_softmax_mask_scale",
            "fused_tril_scale_softmax_mask_scale_grad",
        ),
        call=lambda x, **attributes: flow._C.fused_scale_tril_softmax_mask_scale(
            x, p=0.0, **attributes
        )[0],
        reference=_tril_softmax,
        gradient=_tril_softmax_gradient,
        cases=(
            case("one", (1, 1), diagonal=0, tril_scale_value=1.0, tril_fill_value=-1e4),
            case("empty", (0, 3, 3), diagonal=0, tril_scale_value=1.0, tril_fill_value=-1e4),
            case("causal", (2, 3, 17, 17), diagonal=0, tril_scale_value=0.5, tril_fill_value=-1e4),
            case("wide", (2, 5, 17), diagonal=12, tril_scale_value=1.0, tril_fill_value=-1e4),
            case("fill-counts", (2, 9, 7), diagonal=-2, tril_scale_value=1.0, tril_fill_value=0.25),
            case(
                "threads",
                (2, 12, 67, 67),
                diagonal=0,
                tril_scale_value=0.125,
                tril_fill_value=float(np.finfo(np.float32).min),
            ),
            case("global", (4, 2, 6, 6), diagonal=0, tril_scale_value=0.5, tril_fill_value=-1e4),
        ),
        layouts=(Layout(("S(0)",), "S(0)"), Layout(("S(1)",), "S(1)")),
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        name="fused_scale_tril",
        operators=("fused_scale_tril",),
        call=flow._C.fused_scale_tril,
        reference=_scale_tril,
        gradient=_scale_tril_gradient,
        cases=(
            case("one", (1, 1), diagonal=0, fill_value=0.0, scale=2.0),
            case("empty", (0, 3, 3), diagonal=0, fill_value=0.0, scale=2.0),
            case("filled", (2, 9, 7), diagonal=-2, fill_value=-1.5, scale=0.5),
            case("whole-numbers", (2, 9, 7), diagonal=1, fill_value=-3, scale=2),
            case("beyond", (2, 3, 5), diagonal=9, fill_value=1.0, scale=2.0),
            case("nothing-kept", (2, 3, 5), diagonal=-9, fill_value=1.0, scale=2.0),
            case("threads", (8, 67, 129), diagonal=0, fill_value=0.0, scale=0.125),
            case("global", (4, 2, 6, 6), diagonal=0, fill_value=0.0, scale=0.5),
        ),
        layouts=(Layout(("S(0)",), "S(0)"), Layout(("P",), "P")),
        dtypes=("float32", "float64"),
    ),
    Record(
        name="tril",
        operators=("tril",),
        call=flow.tril,
        reference=lambda x, diagonal: _scale_tril(x, diagonal, 0.0, 1.0),
        gradient=lambda dy, x, diagonal: _scale_tril_gradient(dy, x, diagonal, 0.0, 1.0),
        cases=(
            case("one", (1, 1), diagonal=0),
            case("empty", (0, 3, 3), diagonal=0),
            case("odd", (2, 9, 7), diagonal=-2),
            case("threads", (8, 67, 129), diagonal=1),
            case("global", (4, 6, 6), diagonal=0),
        ),
        layouts=(Layout(("S(0)",), "S(0)"), Layout(("P",), "P")),
    ),
    Record(
        name="fused_self_attention",
        operators=(
            "fused_self_attention_query_mul_key_and_value",
            "fused_self_attention_query_mul_key_and_value_grad",
        ),
        call=_call_attention,
        reference=_attention,
        gradient=_attention_gradient,
        cases=(
            case("one", (1, 1, 3), head_size=1, alpha=1.0),
            case("odd", (5, 3, 2 * 3 * 7), head_size=7, alpha=0.5, reduced=35),
            case("threads", (67, 2, 4 * 3 * 16), head_size=16, alpha=0.25, reduced=16 * 67),
            case("global", (6, 4, 2 * 3 * 8), head_size=8, alpha=0.5, reduced=48),
        ),
        layouts=(Layout(("S(1)",), "S(0)"), Layout(("S(2)",), "S(1)")),
    ),
]
