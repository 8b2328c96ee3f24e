"""This process's part of a block's linear layers, as functions of local tensors.

A `Column` takes whole inputs and gives this process's outputs, a `Row` takes this process's inputs
and gives whole outputs. Of a Monarch layer each process keeps both factors whole and computes all
of it: for the few tokens of a step that costs less than the exchange between the factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

Linear = Callable[[flow.Tensor], flow.Tensor]


def local(parameter: flow.Tensor, sbp: flow.sbp.sbp = BROADCAST) -> flow.Tensor:
    """This process's shard, split over tensor parallelism as `sbp` says.

    ZeRO may have left the parameter split in another way.
    """
    declared = dist.get_nd_sbp([flow.sbp.broadcast, sbp])
    value = parameter.detach()
    if not dist.same_sbp(value.sbp, declared):
        value = value.to_global(sbp=declared)
    return value.to_local()


def column(module: nn.Module, position: Position) -> Linear:
    """The shard of a projection made with parallel="col"."""
    if isinstance(module, QueryKeyValue):
        parts = [column(part, position) for part in (module.q_proj, module.k_proj, module.v_proj)]
        return lambda x: interleave([part(x) for part in parts], module.head_size)
    if isinstance(module, MonarchProjection):
        whole = Monarch.of(module)
        return whole if len(position.group) == 1 else MonarchColumn(whole, position)
    return DenseColumn(local(module.weight, COLUMNS), local(module.bias, ROWS))


def row(module: nn.Module, position: Position) -> Linear:
    """The shard of a projection made with parallel="row"."""
    if isinstance(module, MonarchProjection):
        whole = Monarch.of(module)
        return whole if len(position.group) == 1 else MonarchRow(whole, position)
    return DenseRow(local(module.weight, ROWS), local(module.bias), position)


@dataclass(frozen=True)
class DenseColumn:
    """x W + b of some columns of W."""

    weight: flow.Tensor
    bias: flow.Tensor

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        return flow._C.matmul(x, self.weight) + self.bias


@dataclass(frozen=True)
class DenseRow:
    """x W + b, each process with some rows of W."""

    weight: flow.Tensor
    bias: flow.Tensor
    position: Position

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        return self.position.sum(flow._C.matmul(x, self.weight)) + self.bias


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

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        sizes = (x.shape[-1],) * len(self.position.group)
        return self.layer(self.position.join(x.contiguous(), sizes))
