"""Dropout of elements and of residual branches (stochastic depth), which follow the seed, eagerly
and under nn.Graph."""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from flow_train.steps.random_factors import are_drawn_by_an_operator, random_factors


@bfloat16_container
class Dropout(nn.Dropout):
    """In training each element becomes 0 with probability p and the others are divided by 1 - p
    (Srivastava et al. 2014).

    `nn.Dropout` of oneflow 0.9.0 draws the same under nn.Graph whatever the seed, in every layer.
    So the factors here are those of `random_factors`.
    """

    # See `flow_train.steps.random_factors`.
    draws_random_factors = True

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)
        # None means the default generator.
        self.generator = None

    def forward(self, x: flow.Tensor, addend: flow.Tensor | None = None) -> flow.Tensor:
        """Any shape to the same; `addend`, of the same shape, is added after dropping."""
        if self.training and self.p > 0:
            if are_drawn_by_an_operator(x):
                x = flow._C.dropout(x, self.p, True)
            else:
                x = x * random_factors(x, x.shape, self.p)
        return x if addend is None else x + addend


def dropout(p: float) -> nn.Module:
    """`Dropout`, or a module that costs nothing where p is 0; UserError unless p is in [0, 1]."""
    if not 0 <= p <= 1:
        raise UserError(f"a dropout probability must be between 0 and 1, not {p}")
    return Dropout(p) if p > 0 else nn.Identity()


@bfloat16_container
class DropPath(nn.Module):
    """In training whole samples of (samples, ...) become 0 with probability p and the others are
    divided by 1 - p (Huang et al. 2016); UserError where p is not in [0, 1].

    The factors are those of `random_factors`, so they follow `manual_seed`, in nn.Graph too. At p =
    1 everything is zero.
    """

    # See `flow_train.steps.random_factors`.
    draws_random_factors = True

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UserError(f"a drop path probability must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        if not self.training or self.p == 0:
            return x
        return x * random_factors(x, (x.shape[0],) + (1,) * (x.ndim - 1), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
