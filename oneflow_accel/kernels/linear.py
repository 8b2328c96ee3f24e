"""The operation "linear": a matrix product and its bias in one pass."""

from __future__ import annotations

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.kernels.operators import Operator
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow

# flow._C.fused_matmul_bias runs this operator of OneFlow's on CUDA devices only.
_operator = Operator(
    "fused_matmul_bias",
    inputs=("x", "weight", "bias", "_add_to_output"),
    outputs=("out",),
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
)


def _not_supported_reasons(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> list[str]:
    if x.ndim < 2:
        return [f"x has {x.ndim} dimensions, not 2 or more"]
    return _operator.missing_reasons()


@implementation(
    "linear",
    backend=CpuBackend.name,
    dtypes=(flow.float32, flow.bfloat16),
    not_supported_reasons=_not_supported_reasons,
)
def onednn(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    (y,) = _operator(x, weight, bias, addend)
    return y
