"""Scaled dot-product attention as one operation.

Nothing here drops out attention weights: a caller that wants dropout composes the product, softmax
and dropout itself, or uses LiBai's fused operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend, attention_reasons
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.dropout import hidden_columns
from oneflow_accel.kernels.operators import Operator, differentiable, needs_gradient
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow

_TYPES = {"causal": "bool", "scale": "double"}

_attention = Operator("oneflow_accel_attention", ("query", "key", "value"), ("out", "lse"), _TYPES)
_attention_grad = Operator(
    "oneflow_accel_attention_grad",
    ("out_grad", "query", "key", "value", "out", "lse"),
    ("query_grad", "key_grad", "value_grad"),
    _TYPES,
)
_packed = Operator("oneflow_accel_packed_attention", ("qkv",), ("out", "lse"), _TYPES)
_packed_grad = Operator(
    "oneflow_accel_packed_attention_grad", ("out_grad", "qkv", "out", "lse"), ("qkv_grad",), _TYPES
)


def scaled_dot_product_attention(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> flow.Tensor:
    """softmax(scale query key^T) value, for each batch entry and head: (batch, heads, queries, dim)
    from a query of this shape and a key and a value (batch, heads, keys, dim) of the same dtype,
    local or global (split along batch or heads); ValueError if the shapes do not fit.

    If `causal`, query i sees key j where j <= i + keys - queries (keys >= queries): the last query
    sees all keys, as generation with a key/value cache needs it. `scale` None means 1 / sqrt(dim).
    """
    _check_shapes(query, key, value, causal)
    return _attention_operation(
        query, key, value, causal=causal, scale=_scale(scale, query.shape[-1])
    )


def packed_attention(
    qkv: flow.Tensor, num_heads: int, *, causal: bool = False, scale: float | None = None
) -> flow.Tensor:
    """Self-attention of the three parts of one projection, read where they lie: the layout in which
    a linear layer of 3 x heads x dim outputs gives them, as in ViT and GPT-2.

    `qkv` is (batch, time, 3 x heads x dim) or (batch, time, 3, heads, dim), local or global; along
    axis 2 query, key and value. A global tensor that is split along heads must have five axes.
    Gives (batch, time, heads x dim); ValueError if the shape does not fit. `causal` and `scale` as
    above.
    """
    shape = tuple(qkv.shape)
    fits = shape[2:4] == (3, num_heads) if len(shape) == 5 else len(shape) == 3
    if not fits or num_heads < 1 or math.prod(shape[2:]) % (3 * num_heads) or shape[1] == 0:
        raise ValueError(
            f"qkv of {shape} is neither (batch, time, 3 x heads x dim) nor (batch, time, 3, heads, "
            f"dim) with {num_heads} heads and at least one position"
        )
    dim = math.prod(shape[2:]) // (3 * num_heads)
    if len(shape) == 3:
        qkv = qkv.reshape(*shape[:2], 3, num_heads, dim)
    out = _packed_operation(qkv, causal=causal, scale=_scale(scale, dim))
    return out.reshape(*shape[:2], num_heads * dim)


def _check_shapes(query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, causal: bool) -> None:
    q, k, v = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if len(q) != 4 or len(k) != 4 or k != v or (*q[:2], q[3]) != (*k[:2], k[3]) or k[2] == 0:
        raise ValueError(
            f"query {q}, key {k} and value {v} are not (batch, heads, queries, dim) and twice "
            "(batch, heads, keys, dim) with at least one key"
        )
    if causal and k[2] < q[2]:
        raise ValueError(f"causal attention of {q[2]} queries needs as many keys, not {k[2]}")


def _scale(scale: float | None, dim: int) -> float:
    return 1.0 / math.sqrt(max(dim, 1)) if scale is None else float(scale)


def _composition(
    query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, *, causal: bool, scale: float
) -> flow.Tensor:
    scores = flow.matmul(query, key.transpose(-2, -1)) * scale
    if causal:
        # A sum, as masking operators do not exist on every device.
        scores = scores + hidden_columns(scores) * flow.finfo(scores.dtype).min
    return flow.matmul(flow.softmax(scores, dim=-1), value)


def _packed_composition(qkv: flow.Tensor, *, causal: bool, scale: float) -> flow.Tensor:
    query, key, value = (qkv[:, :, part].permute(0, 2, 1, 3) for part in range(3))
    out = _composition(query, key, value, causal=causal, scale=scale)
    return out.permute(0, 2, 1, 3)


_NO_ATTENTION = {
    MluBackend.name: "oneflow_mlu has no attention operator: a product, softmax and a product"
}
_attention_operation = register_operation(
    "scaled_dot_product_attention",
    reference=_composition,
    doc="softmax(scale query key^T) value.",
    lacks=_NO_ATTENTION,
)
_packed_operation = register_operation(
    "packed_attention",
    reference=_packed_composition,
    doc="softmax(scale query key^T) value of the parts of one projection.",
    lacks=_NO_ATTENTION,
)


def _bfloat16_not_supported(*tensors: flow.Tensor, **attributes: Any) -> list[str]:
    return ["has a gradient in float32 only"] if needs_gradient(*tensors) else []


@lru_cache(maxsize=64)
def _with_gradient(
    forward: Operator, backward: Operator, causal: bool, scale: float
) -> Callable[..., flow.Tensor]:
    def run(ctx: Any, *tensors: flow.Tensor) -> flow.Tensor:
        out, lse = forward(*tensors, causal=causal, scale=scale)
        ctx.save_for_backward(*tensors, out, lse)
        return out

    def gradients(ctx: Any, out_grad: flow.Tensor) -> Any:
        found = backward(out_grad, *ctx.saved_tensors, causal=causal, scale=scale)
        return found if len(found) > 1 else found[0]

    return differentiable(forward.name, run, gradients)


def _run(
    forward: Operator, backward: Operator, *tensors: flow.Tensor, causal: bool, scale: float
) -> flow.Tensor:
    if needs_gradient(*tensors):
        return _with_gradient(forward, backward, causal, scale)(*tensors)
    # An autograd function takes longer to call than one generated token's attention.
    return forward(*tensors, causal=causal, scale=scale)[0]


@implementation(
    "scaled_dot_product_attention",
    backend=CpuBackend.name,
    dtypes=(flow.float32,),
    missing_reasons=_attention.missing_reasons,
)
def blocked_attention(*tensors: flow.Tensor, **attributes: Any) -> flow.Tensor:
    """Keeps no (queries, keys) matrix, neither for the output nor for the gradient."""
    return _run(_attention, _attention_grad, *tensors, **attributes)


@implementation(
    "scaled_dot_product_attention",
    backend=CpuBackend.name,
    dtypes=(flow.bfloat16,),
    missing_reasons=_attention.missing_reasons,
    not_supported_reasons=_bfloat16_not_supported,
)
def blocked_attention_bfloat16(*tensors: flow.Tensor, **attributes: Any) -> flow.Tensor:
    """Reads and writes bfloat16, computes in float32; without a gradient."""
    return _attention(*tensors, **attributes)[0]


@implementation(
    "packed_attention",
    backend=CpuBackend.name,
    dtypes=(flow.float32,),
    missing_reasons=_attention.missing_reasons,
)
def blocked_packed_attention(qkv: flow.Tensor, **attributes: Any) -> flow.Tensor:
    """Keeps no (time, time) matrix, neither for the output nor for the gradient."""
    return _run(_packed, _packed_grad, qkv, **attributes)


@implementation(
    "packed_attention",
    backend=CpuBackend.name,
    dtypes=(flow.bfloat16,),
    missing_reasons=_attention.missing_reasons,
    not_supported_reasons=_bfloat16_not_supported,
)
def blocked_packed_attention_bfloat16(qkv: flow.Tensor, **attributes: Any) -> flow.Tensor:
    """Reads and writes bfloat16, computes in float32; without a gradient."""
    return _packed(qkv, **attributes)[0]


# OneFlow's own operator on CUDA devices (CUTLASS): for inference, with the usual scale. Only in
# float16, as it computes float32 in TF32.
def _inference_reasons(
    dim: int, queries: int, keys: int, *tensors: flow.Tensor, causal: bool, scale: float
) -> list[str]:
    reasons = attention_reasons()
    if needs_gradient(*tensors):
        reasons.append("has no gradient")
    if not math.isclose(scale, _scale(None, dim)):
        reasons.append(f"scales by 1 / sqrt({dim}), not by {scale}")
    if causal and queries != keys:
        reasons.append(f"hides columns by their number, so {queries} queries need as many keys")
    return reasons


def _attention_inference_reasons(
    query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, *, causal: bool, scale: float
) -> list[str]:
    queries, dim = query.shape[2:]
    keys = key.shape[2]
    return _inference_reasons(dim, queries, keys, query, key, value, causal=causal, scale=scale)


def _packed_inference_reasons(qkv: flow.Tensor, *, causal: bool, scale: float) -> list[str]:
    time, dim = qkv.shape[1], qkv.shape[4]
    return _inference_reasons(dim, time, time, qkv, causal=causal, scale=scale)


@implementation(
    "scaled_dot_product_attention",
    backend=CudaBackend.name,
    dtypes=(flow.float16,),
    not_supported_reasons=_attention_inference_reasons,
    never_run=True,
)
def cutlass(
    query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, *, causal: bool, scale: float
) -> flow.Tensor:
    batch, heads, queries, dim = query.shape
    rows = [part.permute(0, 2, 1, 3).flatten(2) for part in (query, key, value)]
    out = flow._C.fused_multi_head_attention_inference(*rows, num_heads=heads, causal=causal)
    return out.reshape(batch, queries, heads, dim).permute(0, 2, 1, 3)


@implementation(
    "packed_attention",
    backend=CudaBackend.name,
    dtypes=(flow.float16,),
    not_supported_reasons=_packed_inference_reasons,
    never_run=True,
)
def cutlass_packed(qkv: flow.Tensor, *, causal: bool, scale: float) -> flow.Tensor:
    batch, time, _, heads, dim = qkv.shape
    width = heads * dim
    rows = qkv.flatten(2)
    slices = {
        f"{part}_hidden_slice_{end}": (place + shift) * width
        for place, part in enumerate(("query", "key", "value"))
        for shift, end in enumerate(("start", "end"))
    }
    out = flow._C.fused_multi_head_attention_inference(
        rows, rows, rows, num_heads=heads, causal=causal, **slices
    )
    return out.reshape(batch, time, heads, dim)
