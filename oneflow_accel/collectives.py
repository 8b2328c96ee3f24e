"""Collectives on flat local tensors over a mesh of processes: pieces of tensors are gathered and
summed along one of its axes, and copies are kept equal along the other.

OneFlow 0.9.0 has collectives of all processes of a job. Those of a row of the mesh are changes of
the layout of a global tensor that lives on the whole mesh. Sums are taken in float32: a CPU's
reductions know neither float16 nor bfloat16, and end the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

_SPLIT, _WHOLE, _SUM = flow.sbp.split(0), flow.sbp.broadcast, flow.sbp.partial_sum


@dataclass(frozen=True)
class Mesh:
    """`shards` neighbouring processes share a tensor, each with a piece; all processes with the
    same piece, one of each such row, are its `replicas`."""

    shards: int
    replicas: int = 1

    @classmethod
    def of(cls, shards: int | None = None) -> Mesh:
        """The mesh of this job with rows of so many processes, one row of all if None. UserError
        where the number does not divide the world size."""
        world = distributed.world_size()
        size = world if shards is None else shards
        if size < 1 or world % size:
            raise UserError(f"{world} processes are not rows of {size}: take a divisor of {world}")
        return cls(size, world // size)

    @property
    def size(self) -> int:
        return self.shards * self.replicas

    @property
    def place(self) -> int:
        """Which piece this process has."""
        return distributed.rank() % self.shards

    def gather(self, piece: flow.Tensor) -> flow.Tensor:
        """The pieces (n,) of a row one after the other, (shards n,)."""
        if self.shards == 1:
            return piece
        if self.replicas == 1:
            whole = flow.empty(self.shards * len(piece), dtype=piece.dtype, device=piece.device)
            flow.comm.all_gather_into_tensor(whole, piece)
            return whole
        return self._relaid(piece, (_WHOLE, _SPLIT), (_WHOLE, _WHOLE))

    def scatter_sum(self, whole: flow.Tensor) -> flow.Tensor:
        """This process's piece (n,) of the sum of all processes' (shards n,), float32."""
        if self.size == 1:
            return whole
        if self.replicas == 1:
            piece = flow.empty(len(whole) // self.shards, dtype=whole.dtype, device=whole.device)
            flow.comm.reduce_scatter_tensor(piece, whole)
            return piece
        if self.shards == 1:
            return self.sum(whole)
        return self._relaid(whole, (_SUM, _SUM), (_SUM, _SPLIT), (_WHOLE, _SPLIT))

    def sum(self, tensor: flow.Tensor) -> flow.Tensor:
        """The sum of all processes' tensors, float32."""
        if self.size == 1:
            return tensor
        return self._relaid(tensor, (_SUM, _SUM), (_SUM, _WHOLE), (_WHOLE, _WHOLE))

    def _relaid(self, tensor: flow.Tensor, given: Any, *steps: Any) -> flow.Tensor:
        """A local tensor, taken as one of a global layout (replicas, shards), in another."""
        ranks = np.arange(self.size).reshape(self.replicas, self.shards).tolist()
        placement = flow.placement(tensor.device.type, ranks)
        value = tensor.to_global(placement=placement, sbp=given)
        for sbp in steps:
            value = value.to_global(sbp=sbp)
        return value.to_local()
