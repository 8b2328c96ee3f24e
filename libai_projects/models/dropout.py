"""Dropout joined with what comes before it, by the fused operators where the device has them.

These draw their masks as the dropout operator does: right on one process in eager mode, but under
nn.Graph from one fixed seed, and on several processes not equal where a tensor is broadcast. There
`oneflow.rand` draws the mask, as in the patched Dropout of LiBai.
"""

from __future__ import annotations

from oneflow_accel.kernels.attention import HIDDEN, causal_softmax_mask_scale
from oneflow_accel.kernels.linear import bias_mask_scale

import oneflow as flow
from libai.layers import Dropout, fused_bias_add_dropout
from libai.utils import distributed as dist


def bias_dropout(x: flow.Tensor, bias: flow.Tensor, dropout: Dropout, fused: bool) -> flow.Tensor:
    """dropout(x + bias) of x (..., n), global, and bias (n,); with `fused` in one operator."""
    if not is_active(dropout):
        return x + bias
    if not fused:
        return dropout(x + bias)
    if _needs_drawn_mask(x):
        return bias_mask_scale(x, bias, _keep_mask(x, dropout.p), 1 / (1 - dropout.p))
    return fused_bias_add_dropout(x, bias, dropout)


def fused_causal_softmax_dropout(
    scores: flow.Tensor, scale: float, dropout: Dropout
) -> flow.Tensor:
    """dropout(softmax(scale scores)) over the columns up to the row's, in one operator, of scores
    (batch, heads, time, time), global; `dropout` must be active."""
    p = dropout.p
    if _needs_drawn_mask(scores):
        return causal_softmax_mask_scale(scores, _keep_mask(scores, p), scale, 1 / (1 - p))
    return flow._C.fused_scale_tril_softmax_mask_scale(
        scores, p=p, diagonal=0, tril_scale_value=scale, tril_fill_value=HIDDEN
    )[0]


def is_active(dropout: Dropout) -> bool:
    """Whether it drops anything now."""
    return bool(dropout.training and dropout.p > 0)


def _needs_drawn_mask(x: flow.Tensor) -> bool:
    needed = x.is_lazy or dist.get_world_size() > 1
    return needed and bool(dist.get_backend().supports("uniform_random"))


def _keep_mask(x: flow.Tensor, p: float) -> flow.Tensor:
    """Truth values of the shape and layout of `x`, each False with probability `p`."""
    return flow.rand(*x.shape, dtype=x.dtype, placement=x.placement, sbp=x.sbp) >= p
