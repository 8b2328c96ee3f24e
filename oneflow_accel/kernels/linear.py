"""Linear layers, with what follows them: "linear" and "bias_mask_scale"."""

from __future__ import annotations

from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.operators import Operator, needs_gradient
from oneflow_accel.kernels.registry import (
    cpu_implementation,
    implementation,
    register_operation,
)

import oneflow as flow

# flow._C.fused_matmul_bias runs this operator of OneFlow's on CUDA devices only. Its gradient
# leaves the addend out.
_operator = Operator(
    "fused_matmul_bias",
    ("x", "weight", "bias", "_add_to_output"),
    ("out",),
    optional=("_add_to_output",),
)


def _reference(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    y = flow._C.matmul(x, weight, transpose_b=True) + bias
    return y if addend is None else addend + y


linear = register_operation(
    "linear",
    reference=_reference,
    doc="x weight^T + bias (+ addend): x (..., in), weight (out, in), bias (out,), "
    "addend (..., out) to (..., out)",
    lacks={MluBackend.name: "oneflow_mlu has no fused_matmul_bias: a product, then sums"},
)


def _too_few_dimensions(x: flow.Tensor, *_: flow.Tensor | None) -> list[str]:
    return [] if x.ndim >= 2 else [f"x has {x.ndim} dimensions, not 2 or more"]


@cpu_implementation("linear", _operator, not_supported_reasons=_too_few_dimensions)
def onednn(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    if needs_gradient(addend):
        return addend + _operator(x, weight, bias, None)[0]
    (y,) = _operator(x, weight, bias, addend)
    return y


@implementation(
    "linear",
    backend=CudaBackend.name,
    not_supported_reasons=_too_few_dimensions,
    never_run=True,
)
def cublas_lt(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    """OneFlow's own operator, whose epilogue adds the bias."""
    if needs_gradient(addend):
        return addend + flow._C.fused_matmul_bias(x, weight, bias)
    return flow._C.fused_matmul_bias(x, weight, bias, addend)


# Dropout with a mask that the caller drew; OneFlow's own function for this operator draws it.
_bias = Operator(
    "fused_bias_add_mask_scale",
    inputs=("a", "b", "mask"),
    outputs=("out",),
    attributes={"axis": "int32", "scale": "float"},
)


def _bias_reference(
    x: flow.Tensor, bias: flow.Tensor, keep: flow.Tensor, scale: float
) -> flow.Tensor:
    return (x + bias) * (keep.to(x.dtype) * scale)


bias_mask_scale = register_operation(
    "bias_mask_scale",
    reference=_bias_reference,
    doc="(x + bias) * scale where keep is true, else 0: x and keep (..., n), bias (n,)",
    lacks={MluBackend.name: "oneflow_mlu has no fused_* operator: a sum and a product"},
)


# OneFlow has a CUDA kernel too; the plug-in is what calls it with a given mask.
@implementation(
    "bias_mask_scale",
    backend=CudaBackend.name,
    missing_reasons=_bias.missing_reasons,
    never_run=True,
)
@cpu_implementation("bias_mask_scale", _bias)
def fused_bias_mask_scale(
    x: flow.Tensor, bias: flow.Tensor, keep: flow.Tensor, scale: float
) -> flow.Tensor:
    """One pass over x."""
    return _bias(x, bias, keep, axis=x.ndim - 1, scale=scale)[0]
