"""The operation "performer_attention": attention that is linear in the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.operators import Operator, differentiable, needs_gradient
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow

_TYPES = {"epsilon": "double"}

_forward = Operator(
    "oneflow_accel_performer",
    inputs=("kqv", "w"),
    # The last: what the queries read of keys and values, which the gradient needs too.
    outputs=("out", "value", "summary"),
    attributes=_TYPES,
)
_backward = Operator(
    "oneflow_accel_performer_grad",
    ("out_grad", "value_grad", "kqv", "w", "out", "summary"),
    ("kqv_grad",),
    _TYPES,
)


def performer_attention(
    kqv: flow.Tensor, w: flow.Tensor, *, epsilon: float = 1e-8
) -> tuple[flow.Tensor, flow.Tensor]:
    """Attention by positive random features (Choromanski et al. 2021, section 2.3), of one head.

    With phi(x) = exp(w x - |x|^2 / 2) / sqrt(features), token t gets phi(q_t) (sum_s phi(k_s)
    v_s^T) / (phi(q_t) sum_s phi(k_s) + epsilon).

    kqv is (batch, time, 3 x dim), key, query and value in this order; w (features, dim) is
    constant: kernels have no gradient for it, and the reference runs where it requires one. Global
    tensors may be split along the batch, with w broadcast. ValueError if the shapes do not fit.

    Gives the attention, and the value alone, both (batch, time, dim): models add the second to what
    they make of the first, and to take it from kqv would cost its gradient another copy.
    """
    projection, features = tuple(kqv.shape), tuple(w.shape)
    if (
        len(projection) != 3
        or len(features) != 2
        or 0 in features
        or projection[2] != 3 * features[1]
    ):
        raise ValueError(
            f"kqv {projection} and w {features} are not (batch, time, 3 x dim) and (features, dim)"
        )
    return _operation(kqv, w, epsilon=float(epsilon))


def _reference(
    kqv: flow.Tensor, w: flow.Tensor, *, epsilon: float
) -> tuple[flow.Tensor, flow.Tensor]:
    dtype, dim = kqv.dtype, w.shape[1]
    if dtype in (flow.float16, flow.bfloat16):
        # Neither the exponentials nor 1e-8 can be told from 0 or infinity in 16 bits.
        kqv, w = kqv.to(flow.float32), w.to(flow.float32)
    key, query, value = (kqv[:, :, part * dim : (part + 1) * dim] for part in range(3))
    if 0 in kqv.shape:
        # OneFlow's own kernel for products of float64 ends the process without rows.
        return (value * 0).to(dtype), value.to(dtype)
    keys, queries = _random_features(key, w), _random_features(query, w)
    summary = flow.matmul(keys.transpose(1, 2), value)
    total = flow.matmul(queries, keys.sum(dim=1).unsqueeze(-1))
    out = flow.matmul(queries, summary) / (total + epsilon)
    return out.to(dtype), value.to(dtype)


def _random_features(x: flow.Tensor, w: flow.Tensor) -> flow.Tensor:
    """phi(x), (batch, time, features), positive."""
    half_squares = (x * x).sum(dim=-1, keepdim=True) / 2
    projected = flow.matmul(x, w.transpose(0, 1))
    return flow.exp(projected - half_squares) / math.sqrt(w.shape[0])


_operation = register_operation(
    "performer_attention",
    reference=_reference,
    doc="phi(q) (phi(k)^T v) / (phi(q) sum phi(k) + epsilon) with positive random features phi, of "
    "the parts of one projection, and v",
    lacks=dict.fromkeys(
        (CudaBackend.name, MluBackend.name),
        "no such operator there: products, sums and an exponential one after another",
    ),
)


def _not_supported(kqv: flow.Tensor, w: flow.Tensor, **attributes: Any) -> list[str]:
    return ["has no gradient for w"] if needs_gradient(w) else []


@lru_cache(maxsize=16)
def _with_gradient(epsilon: float) -> Callable[..., tuple[flow.Tensor, flow.Tensor]]:
    def run(ctx: Any, kqv: flow.Tensor, w: flow.Tensor) -> Any:
        out, value, summary = _forward(kqv, w, epsilon=epsilon)
        ctx.save_for_backward(kqv, w, out, summary)
        return out, value

    def gradients(ctx: Any, out_grad: flow.Tensor, value_grad: flow.Tensor) -> Any:
        return (*_backward(out_grad, value_grad, *ctx.saved_tensors, epsilon=epsilon), None)

    return differentiable(_forward.name, run, gradients)


@implementation(
    "performer_attention",
    backend=CpuBackend.name,
    dtypes=(flow.float32,),
    missing_reasons=_forward.missing_reasons,
    not_supported_reasons=_not_supported,
)
def in_tiles(
    kqv: flow.Tensor, w: flow.Tensor, *, epsilon: float
) -> tuple[flow.Tensor, flow.Tensor]:
    """Reads the projection where it lies, and keeps no features of tokens."""
    if needs_gradient(kqv):
        return _with_gradient(epsilon)(kqv, w)
    out, value, _ = _forward(kqv, w, epsilon=epsilon)
    return out, value
