"""Dropout whose masks follow `manual_seed`, in eager mode and under nn.Graph.

Under nn.Graph the dropout operators of oneflow 0.9.0 start every layer and every shard from one
fixed seed. Numbers of `oneflow.rand` do not: they differ from layer to layer and between the shards
of a split tensor, are equal where a tensor is broadcast, and are drawn again alike where activation
checkpointing computes a layer twice.
"""

from __future__ import annotations

from oneflow_accel.kernels.dropout import bias_mask_scale

import oneflow as flow
from libai.utils import distributed as dist
from oneflow import nn


def keep_mask(x: flow.Tensor, p: float) -> flow.Tensor:
    """Truth values of the shape and layout of `x`, each False with probability `p`."""
    if x.is_global:
        drawn = flow.rand(*x.shape, placement=x.placement, sbp=x.sbp)
    else:
        drawn = flow.rand(*x.shape, device=x.device)
    return drawn >= p


class Dropout(nn.Module):
    """x / (1 - p) where an element is kept and 0 elsewhere; x itself in evaluation.

    Args:
        p: probability that an element is dropped, in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # A device that draws no uniform numbers has only the operator, with what it lacks.
        self.operator = None if dist.get_backend().supports("uniform_random") else nn.Dropout(p)

    @property
    def active(self) -> bool:
        return self.training and self.p > 0

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        if not self.active:
            return x
        if self.operator is not None:
            return self.operator(x)
        return x * (keep_mask(x, self.p).to(x.dtype) * (1 / (1 - self.p)))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class BiasDropout(Dropout):
    """Dropout of x + bias, in one operator where `fused` is on and the device has it."""

    def __init__(self, p: float, fused: bool) -> None:
        super().__init__(p)
        self.fused = fused

    def forward(self, x: flow.Tensor, bias: flow.Tensor) -> flow.Tensor:
        """x (..., n) and bias (n,) to (..., n)."""
        if self.fused and self.active and self.operator is None:
            return bias_mask_scale(x, bias, keep_mask(x, self.p), 1 / (1 - self.p))
        return super().forward(x + bias)
