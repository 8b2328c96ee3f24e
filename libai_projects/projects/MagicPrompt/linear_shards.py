"""This process's part of a block's linear layers, as functions of local tensors.

A `Column` takes whole inputs and gives this process's outputs, a `Row` takes this process's inputs
and gives whole outputs, added to the residual. Of a Monarch layer each process keeps both factors
whole and computes all of it: for the few tokens of a step that costs less than the exchange between
the factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oneflow_accel.inference.huge_pages import use_huge_pages
from oneflow_accel.kernels.linear import linear
from oneflow_accel.kernels.monarch import monarch_multiply

import oneflow as flow
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.projects.MagicPrompt.communication import Position
from libai_projects.projects.MagicPrompt.projections import (
    MonarchProjection,
    QueryKeyValue,
    interleave,
)

BROADCAST, COLUMNS, ROWS = flow.sbp.broadcast, flow.sbp.split(1), flow.sbp.split(0)

Column = Callable[[flow.Tensor], flow.Tensor]
# Of the inputs and the residual.
Row = Callable[[flow.Tensor, flow.Tensor], flow.Tensor]
# An implementation of the operation "linear".
Product = Callable[..., flow.Tensor]


def local(parameter: flow.Tensor, sbp: flow.sbp.sbp = BROADCAST) -> flow.Tensor:
    """This process's shard, split over tensor parallelism as `sbp` says.

    ZeRO may have left the parameter split in another way.
    """
    declared = dist.get_nd_sbp([flow.sbp.broadcast, sbp])
    value = parameter.detach()
    if not dist.same_sbp(value.sbp, declared):
        value = value.to_global(sbp=declared)
    return value.to_local()


def column(module: nn.Module, position: Position) -> Column:
    """The shard of a projection made with parallel="col"."""
    if isinstance(module, QueryKeyValue):
        parts = [column(part, position) for part in (module.q_proj, module.k_proj, module.v_proj)]
        return lambda x: interleave([part(x) for part in parts], module.head_size)
    if isinstance(module, MonarchProjection):
        whole = Monarch.of(module)
        return whole if len(position.group) == 1 else MonarchColumn(whole, position)
    weight, bias = _transposed(module, COLUMNS), local(module.bias, ROWS)
    return DenseColumn(weight, bias, _product(weight, bias))


def row(module: nn.Module, position: Position) -> Row:
    """The shard of a projection made with parallel="row"."""
    if isinstance(module, MonarchProjection):
        return MonarchRow(Monarch.of(module), position)
    weight, bias = _transposed(module, ROWS), local(module.bias)
    return DenseRow(weight, bias, _product(weight, bias), position)


def _transposed(module: nn.Module, sbp: flow.sbp.sbp) -> flow.Tensor:
    """The shard (out, in) of a weight (in, out): the operator that adds the bias and the residual
    to the product takes it this way round. A copy, in huge pages."""
    weight = local(module.weight, sbp).transpose(0, 1).contiguous()
    use_huge_pages(weight)
    return weight


def _product(weight: flow.Tensor, bias: flow.Tensor) -> Product:
    x = flow.empty(1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return linear.choose(x, weight, bias)


@dataclass(frozen=True)
class DenseColumn:
    """x weight^T + b of some rows of the weight (out, in)."""

    weight: flow.Tensor
    bias: flow.Tensor
    product: Product

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True)
class DenseRow:
    """x weight^T + b, each process with some columns of the weight (out, in)."""

    weight: flow.Tensor
    bias: flow.Tensor
    product: Product
    position: Position

    def __call__(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        if len(self.position.group) == 1:
            return self.product(x, self.weight, self.bias, residual)
        part = flow._C.matmul(x, self.weight, transpose_b=True)
        return residual + (self.position.sum(part) + self.bias)


@dataclass(frozen=True)
class Monarch:
    """A whole Monarch layer."""

    blkdiag1: flow.Tensor
    blkdiag2: flow.Tensor
    bias: flow.Tensor

    @classmethod
    def of(cls, module: MonarchProjection) -> Monarch:
        """Every process of the run has to call it."""
        return cls(local(module.blkdiag1), local(module.blkdiag2), local(module.bias))

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        factors = self.blkdiag1, self.blkdiag2
        return monarch_multiply(x, *factors, self.bias, out_features=self.bias.shape[0])


@dataclass(frozen=True)
class MonarchColumn:
    """This process's outputs of a Monarch layer."""

    layer: Monarch
    position: Position

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        y = self.layer(x)
        group = self.position.group
        width = y.shape[-1] // len(group)
        return flow._C.narrow(y, y.ndim - 1, width * group.index(self.position.rank), width)


@dataclass(frozen=True)
class MonarchRow:
    """A Monarch layer whose inputs are shared out."""

    layer: Monarch
    position: Position

    def __call__(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        if len(self.position.group) > 1:
            sizes = (x.shape[-1],) * len(self.position.group)
            x = self.position.join(x.contiguous(), sizes)
        return residual + self.layer(x)
