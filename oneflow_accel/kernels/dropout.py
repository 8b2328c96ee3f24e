"""Operations that drop out with a mask which the caller drew, joined with their neighbours.

OneFlow's own functions draw the mask themselves, under nn.Graph from a seed that is the same for
every layer. A mask that the caller draws with `oneflow.rand` follows `manual_seed` everywhere.
"""

from __future__ import annotations

from typing import Any

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.operators import Operator
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow

# Both are OneFlow's; its Python functions for them draw the mask.
_bias = Operator(
    "fused_bias_add_mask_scale",
    inputs=("a", "b", "mask"),
    outputs=("out",),
    attributes={"axis": "int32", "scale": "float"},
)
_tril = Operator(
    "fused_tril_scale_softmax_mask_scale",
    inputs=("x", "mask"),
    outputs=("y", "softmax_y"),
    attributes={
        "diagonal": "int64",
        "tril_fill_value": "float",
        "tril_scale_value": "float",
        "mask_scale_value": "float",
    },
)
_NO_FUSED = "oneflow_mlu has no fused_* operator"
# exp(HIDDEN - maximum) is 0 in every dtype, and unlike -infinity it leaves a row that sees
# nothing finite.
HIDDEN = -10000.0


def _bias_reference(
    x: flow.Tensor, bias: flow.Tensor, keep: flow.Tensor, scale: float
) -> flow.Tensor:
    return (x + bias) * (keep.to(x.dtype) * scale)


def _causal_reference(
    scores: flow.Tensor, keep: flow.Tensor, scale: float, keep_scale: float
) -> flow.Tensor:
    return causal_softmax(scores, scale) * (keep.to(scores.dtype) * keep_scale)


bias_mask_scale = register_operation(
    "bias_mask_scale",
    reference=_bias_reference,
    doc="(x + bias) * scale where keep is true, else 0: x and keep (..., n), bias (n,)",
    lacks={MluBackend.name: f"{_NO_FUSED}: a sum and a product"},
)
causal_softmax_mask_scale = register_operation(
    "causal_softmax_mask_scale",
    reference=_causal_reference,
    doc="softmax of scale * scores over the columns up to the row's, times keep_scale where keep "
    "is true, else 0: scores and keep (..., time, time)",
    lacks={MluBackend.name: f"{_NO_FUSED}: a sum, softmax and a product"},
)


def causal_softmax(scores: flow.Tensor, scale: float) -> flow.Tensor:
    """softmax(scale scores) over the columns up to the row's own, made of plain operators.

    Row i of (..., rows, columns), local or global, sees columns up to i + columns - rows; the
    result is 0 where it does not see a column.
    """
    # A sum, as masking operators do not exist on every device.
    return flow.softmax(scores * scale + hidden_columns(scores) * HIDDEN, dim=-1)


def hidden_columns(scores: flow.Tensor) -> flow.Tensor:
    """1 where a row of (..., rows, columns) does not see a column and 0 elsewhere, (rows, columns),
    of the same dtype and, for global tensors, broadcast: row i sees columns up to
    i + columns - rows."""
    rows, columns = scores.shape[-2:]
    # int32, because not every device compares int64.
    place: dict[str, Any] = {"dtype": flow.int32}
    if scores.is_global:
        place["placement"] = scores.placement
        place["sbp"] = [flow.sbp.broadcast] * len(scores.sbp)
    else:
        place["device"] = scores.device
    last = flow.arange(rows, **place).reshape(rows, 1) + (columns - rows)
    return (flow.arange(columns, **place).reshape(1, columns) > last).to(scores.dtype)


# OneFlow has CUDA kernels of both operators; the plug-in is what calls them with a given mask.
@implementation(
    "bias_mask_scale",
    backend=CudaBackend.name,
    dtypes=(flow.float32, flow.float64, flow.float16, flow.bfloat16),
    missing_reasons=_bias.missing_reasons,
    never_run=True,
)
@implementation(
    "bias_mask_scale",
    backend=CpuBackend.name,
    dtypes=(flow.float32,),
    missing_reasons=_bias.missing_reasons,
)
def fused_bias_mask_scale(
    x: flow.Tensor, bias: flow.Tensor, keep: flow.Tensor, scale: float
) -> flow.Tensor:
    """One pass over x."""
    return _bias(x, bias, keep, axis=x.ndim - 1, scale=scale)[0]


@implementation(
    "causal_softmax_mask_scale",
    backend=CudaBackend.name,
    dtypes=(flow.float32, flow.float64, flow.float16),
    missing_reasons=_tril.missing_reasons,
    never_run=True,
)
@implementation(
    "causal_softmax_mask_scale",
    backend=CpuBackend.name,
    dtypes=(flow.float32,),
    missing_reasons=_tril.missing_reasons,
)
def fused_causal_softmax_mask_scale(
    scores: flow.Tensor, keep: flow.Tensor, scale: float, keep_scale: float
) -> flow.Tensor:
    """One pass over the scores, and no mask of what a row sees."""
    return _tril(
        scores,
        keep,
        diagonal=scores.shape[-1] - scores.shape[-2],
        tril_fill_value=HIDDEN,
        tril_scale_value=scale,
        mask_scale_value=keep_scale,
    )[0]
