"""The operation "monarch_multiply": a product with a Monarch matrix, given by its two factors."""

from __future__ import annotations

from oneflow_accel.kernels.registry import register_operation

import oneflow as flow


def _reference(x: flow.Tensor, blkdiag1: flow.Tensor, blkdiag2: flow.Tensor) -> flow.Tensor:
    blocks1, inner, width1 = blkdiag1.shape
    blocks2, outer, width2 = blkdiag2.shape
    lead = tuple(x.shape[:-1])
    rows = x.reshape(-1, blocks1, width1).permute(1, 0, 2)
    middle = flow.bmm(rows, blkdiag1.permute(0, 2, 1)).permute(1, 0, 2)
    middle = middle.reshape(-1, width2, blocks2).permute(2, 0, 1)
    out = flow.bmm(middle, blkdiag2.permute(0, 2, 1)).permute(1, 2, 0)
    return out.reshape(*lead, outer * blocks2)


monarch_multiply = register_operation(
    "monarch_multiply",
    reference=_reference,
    doc="x M^T for the Monarch matrix M of the factors blkdiag1 (k, q, p), blkdiag2 (l, s, r): "
    "x (..., k p) to (..., l s), with l r = k q",
)
