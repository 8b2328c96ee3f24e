"""DropPath: leaves out a residual branch for some samples of a batch (stochastic depth)."""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from flow_train.steps.random_factors import random_factors


def drop_path(x: flow.Tensor, p: float) -> flow.Tensor:
    """Zero whole samples of x (samples, ...) with probability p and divide the others by 1 - p
    (Huang et al. 2016).

    The factors are those of `random_factors`, so they follow `manual_seed`, in nn.Graph too. At p =
    1 everything is zero.
    """
    return x * random_factors(x, (x.shape[0],) + (1,) * (x.ndim - 1), p)


@bfloat16_container
class DropPath(nn.Module):
    """`drop_path` in training, the identity in evaluation; UserError where p is not in [0, 1]."""

    # See `flow_train.steps.random_factors`.
    draws_random_factors = True

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UserError(f"a drop path probability must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return drop_path(x, self.p) if self.training and self.p > 0 else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
