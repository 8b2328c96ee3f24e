"""The operation "linear": a matrix product and its bias in one pass."""

from __future__ import annotations

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.operators import Operator, needs_gradient
from oneflow_accel.kernels.registry import implementation, register_operation

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


def _too_few_dimensions(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> list[str]:
    return [] if x.ndim >= 2 else [f"x has {x.ndim} dimensions, not 2 or more"]


@implementation(
    "linear",
    backend=CpuBackend.name,
    dtypes=(flow.float32, flow.bfloat16),
    missing_reasons=_operator.missing_reasons,
    not_supported_reasons=_too_few_dimensions,
)
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
    dtypes=(flow.float32, flow.float64, flow.float16, flow.bfloat16),
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
