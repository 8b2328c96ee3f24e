"""What Llama-like transformers fuse beside attention: rotary position embedding, RMS norm of a sum
with the residual, and SwiGLU."""

from __future__ import annotations

import math
from typing import Any

from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.operators import Operator, differentiable, widened, with_gradient
from oneflow_accel.kernels.registry import (
    cpu_implementation,
    implementation,
    on_cards,
    register_operation,
)
from oneflow_accel.kernels.weight_dropout import checked_seed, factors
from oneflow_accel.patching.runtime import device_supports

import oneflow as flow

_ELSEWHERE = on_cards("no such operator there: one operator after another")


# Rotary position embedding.

_rope = Operator(
    "oneflow_accel_rope",
    ("x", "cosines", "sines"),
    ("y",),
    {"axis": "int64", "interleaved": "bool", "inverse": "bool"},
)


def rope(
    x: flow.Tensor,
    cosines: flow.Tensor,
    sines: flow.Tensor,
    *,
    axis: int = 1,
    interleaved: bool = False,
) -> flow.Tensor:
    """x (..., dim) with pairs of its last axis turned by the angle of their time, which is at
    `axis` (Su et al. 2021, "RoFormer", section 3.2); the same shape and dtype.

    `cosines` and `sines` are (time, dim / 2), float32, and get no gradient. Pairs are i and
    i + dim / 2, as in Hugging Face's models, or with `interleaved` neighbours, as in Meta's.
    ValueError if the shapes do not fit.
    """
    shape = tuple(x.shape)
    axis = axis % len(shape)
    fits = axis < len(shape) - 1 and shape[-1] % 2 == 0
    if not fits or any(tuple(t.shape) != (shape[axis], shape[-1] // 2) for t in (cosines, sines)):
        raise ValueError(
            f"x {shape} with the time at axis {axis}, cosines {tuple(cosines.shape)} and sines "
            f"{tuple(sines.shape)} are not (..., time, ..., dim) and twice (time, dim / 2)"
        )
    return _rope_operation(x, cosines, sines, axis=axis, interleaved=interleaved)


def _rope_reference(
    x: flow.Tensor, cosines: flow.Tensor, sines: flow.Tensor, *, axis: int, interleaved: bool
) -> flow.Tensor:
    dim = x.shape[-1]
    between = [1] * (x.ndim - 2 - axis)
    table = (x.shape[axis], *between, dim // 2)
    cosines, sines = (t.reshape(*table).to(x.dtype) for t in (cosines, sines))
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], dim // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        # Unlike narrow's, the gradient of a slice has no kernel on some devices.
        first, second = x.narrow(-1, 0, dim // 2), x.narrow(-1, dim // 2, dim // 2)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    if interleaved:
        return flow.stack(turned, dim=-1).reshape(*x.shape)
    return flow.cat(turned, dim=-1)


_rope_operation = register_operation(
    "rope",
    reference=_rope_reference,
    doc="rotary position embedding of x (..., time, ..., dim), by cosines and sines of "
    "(time, dim / 2)",
    lacks=_ELSEWHERE,
)


def _rope_backward(angles: Any, y_grad: flow.Tensor, **attributes: Any) -> Any:
    return (*_rope(y_grad, *angles, **attributes, inverse=True), None, None)


# bfloat16 has its angles in float32.
@cpu_implementation("rope", _rope)
@differentiable(_rope.name, _rope_backward, autocast=None)
def fused_rope(x: flow.Tensor, *angles: flow.Tensor, **attributes: Any) -> Any:
    """One pass; the gradient is the turn back, and keeps nothing of x."""
    return _rope(x, *angles, **attributes, inverse=False)[0], angles


# RMS norm.

# OneFlow's own.
_rms_norm = Operator("rms_norm", ("x", "weight"), ("y", "inv_rms"), {"epsilon": "float"})
_add_rms_norm = Operator(
    "oneflow_accel_add_rms_norm",
    ("x", "residual", "weight", "seed"),
    ("y", "sum", "inv_rms"),
    {"epsilon": "double", "dropout": "double"},
    optional=("seed",),
)
_add_rms_norm_grad = Operator(
    "oneflow_accel_add_rms_norm_grad",
    ("y_grad", "sum_grad", "sum", "inv_rms", "weight"),
    ("residual_grad", "weight_grad"),
)
_add_rms_norm_x_grad = Operator(
    "oneflow_accel_add_rms_norm_x_grad",
    ("residual_grad", "seed"),
    ("x_grad",),
    {"dropout": "double"},
)


def rms_norm(x: flow.Tensor, weight: flow.Tensor, *, epsilon: float) -> flow.Tensor:
    """x / sqrt(mean(x^2) + epsilon) weight of each row (Zhang and Sennrich 2019, equation 4):
    (..., n) from x (..., n) and a weight (n,), of one dtype; 16-bit rows are averaged in float32.
    ValueError if the shapes do not fit.
    """
    _check_rows(x, weight)
    return _rms_norm_operation(x, weight, epsilon=float(epsilon))


def add_rms_norm(
    x: flow.Tensor,
    residual: flow.Tensor,
    weight: flow.Tensor,
    *,
    epsilon: float,
    dropout: float = 0.0,
    seed: flow.Tensor | None = None,
) -> tuple[flow.Tensor, flow.Tensor]:
    """The RMS norm of residual + dropout(x), and that sum: both (..., n), as x and the residual
    are, of one dtype; `weight` (n,) and `epsilon` as in `rms_norm`.

    `dropout`, at least 0 and below 1, is the probability with which an element of x counts as 0;
    others are multiplied by 1 / (1 - dropout). Which ones depends on `seed`, of `draw_seed`, and on
    the place in the whole tensor, as in attention. ValueError if the shapes do not fit.
    """
    _check_rows(x, weight)
    if tuple(residual.shape) != tuple(x.shape):
        raise ValueError(f"a residual of {tuple(residual.shape)} is not of x's {tuple(x.shape)}")
    seed = checked_seed(dropout, seed)
    how = {"epsilon": float(epsilon), "dropout": float(dropout)}
    return _add_rms_norm_operation(x, residual, weight, seed, **how)


def _check_rows(x: flow.Tensor, weight: flow.Tensor) -> None:
    shape, columns = tuple(x.shape), tuple(weight.shape)
    if len(shape) < 2 or columns != shape[-1:]:
        raise ValueError(f"x {shape} and a weight of {columns} are not (..., n) and (n,)")


def _rms_norm_reference(x: flow.Tensor, weight: flow.Tensor, *, epsilon: float) -> flow.Tensor:
    wide = widened(x)
    # Not rsqrt, whose gradient has no kernel on some devices.
    scale = ((wide * wide).mean(dim=-1, keepdim=True) + epsilon) ** -0.5
    return (wide * scale).to(x.dtype) * weight


def _add_rms_norm_reference(
    x: flow.Tensor,
    residual: flow.Tensor,
    weight: flow.Tensor,
    seed: flow.Tensor | None = None,
    *,
    epsilon: float,
    dropout: float = 0.0,
) -> tuple[flow.Tensor, flow.Tensor]:
    if seed is not None:
        # By the places of (batch, time, ..., n) as attention has (batch, heads, queries, keys).
        time = x.shape[1] if x.ndim > 2 else 1
        places = x.reshape(x.shape[0], time, math.prod(x.shape[2:-1]), x.shape[-1])
        x = x * factors(places, seed, dropout).reshape(*x.shape)
    total = x + residual
    return _rms_norm_reference(total, weight, epsilon=epsilon), total


_rms_norm_operation = register_operation(
    "rms_norm",
    reference=_rms_norm_reference,
    doc="x (..., n) divided by the root of its rows' mean square, times weight (n,)",
    lacks={MluBackend.name: "oneflow_mlu has no rms_norm: one operator after another"},
)
_add_rms_norm_operation = register_operation(
    "add_rms_norm",
    reference=_add_rms_norm_reference,
    doc="dropout(x) + residual, (..., n), normalized by the root of its mean square and times "
    "weight (n,), and the sum itself",
    lacks=_ELSEWHERE,
)


@cpu_implementation("rms_norm", _rms_norm, dtypes=(flow.float32, flow.float64, flow.bfloat16))
@implementation("rms_norm", backend=CudaBackend.name, never_run=True)
def oneflow_rms_norm(x: flow.Tensor, weight: flow.Tensor, *, epsilon: float) -> flow.Tensor:
    """OneFlow's operator, for which the plug-in has a kernel: keeps x and a number for each row."""
    return flow._C.rms_norm(x, weight, x.shape[-1:], epsilon)


def _add_rms_norm_backward(
    kept: Any, *gradients: flow.Tensor, epsilon: float, dropout: float
) -> tuple[flow.Tensor | None, ...]:
    *norm, seed = kept
    residual_grad, weight_grad = _add_rms_norm_grad(*gradients, *norm)
    x_grad = residual_grad
    if seed is not None:
        (x_grad,) = _add_rms_norm_x_grad(residual_grad, seed, dropout=dropout)
    return x_grad, residual_grad, weight_grad, None


@cpu_implementation("add_rms_norm", _add_rms_norm)
@differentiable(_add_rms_norm.name, _add_rms_norm_backward)
def fused_add_rms_norm(*tensors: flow.Tensor | None, **attributes: Any) -> Any:
    """Keeps the sum, which is the next residual, and a number for each row; no mask."""
    y, total, inv_rms = _add_rms_norm(*tensors, **attributes)
    *_, weight, seed = tensors
    return (y, total), (total, inv_rms, weight, seed)


# SwiGLU.

_swiglu = Operator("oneflow_accel_swiglu", ("gate", "up"), ("out",))
_swiglu_grad = Operator(
    "oneflow_accel_swiglu_grad", ("out_grad", "gate", "up"), ("gate_grad", "up_grad")
)


def silu(x: flow.Tensor) -> flow.Tensor:
    """x sigmoid(x), where a device has no such operator by way of tanh."""
    if device_supports(x, "silu"):
        return flow._C.silu(x)
    return x * (flow.tanh(x * 0.5) * 0.5 + 0.5)


class SiLU(flow.nn.SiLU):
    """The module, on any device."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return silu(x)


swiglu = register_operation(
    "swiglu",
    reference=lambda gate, up: silu(gate) * up,
    doc="silu(gate) up, of one shape (Shazeer 2020)",
    lacks=_ELSEWHERE,
)


# One pass; keeps the inputs, and computes silu again for the gradient.
cpu_implementation("swiglu", _swiglu)(
    with_gradient("fused_swiglu", _swiglu, _swiglu_grad, autocast=flow.bfloat16)
)
