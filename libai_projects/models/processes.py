"""How the processes of a layout talk while tokens are generated: local tensors, few messages.

OneFlow checks the placements of global tensors across all processes, so with them each process
would have to take part in what the other pipeline stages do.
"""

from __future__ import annotations

from dataclasses import dataclass

from oneflow_accel import distributed

import oneflow as flow
from libai.utils import distributed as dist

BROADCAST, COLUMNS, ROWS = flow.sbp.broadcast, flow.sbp.split(1), flow.sbp.split(0)


def local(parameter: flow.Tensor, sbp: flow.sbp.sbp = BROADCAST) -> flow.Tensor:
    """This process's shard by `sbp`, also where ZeRO has split the parameter; collective."""
    declared = dist.get_nd_sbp([flow.sbp.broadcast, sbp])
    value = parameter.detach()
    if not dist.same_sbp(value.sbp, declared):
        value = value.to_global(sbp=declared)
    return value.to_local()


def shares(rows: int, processes: int) -> tuple[int, ...]:
    """How OneFlow splits an axis: evenly, the first ones get what is left over."""
    each, more = divmod(rows, processes)
    return tuple(each + (index < more) for index in range(processes))


@dataclass(frozen=True)
class Place:
    """Where a process stands in the layout of `dist.get_dist_util()`; `group` are the ranks that
    hold the shards of its tensors, itself included, in order."""

    rank: int
    world_size: int
    stage: int
    stages: int
    group: tuple[int, ...]

    @classmethod
    def current(cls) -> Place:
        """That of this process: ranks count tensor shards fastest, then replicas, then stages."""
        layout = dist.get_dist_util()
        rank, tensor = dist.get_rank(), layout.tensor_parallel_size
        first = rank - rank % tensor
        return cls(
            rank=rank,
            world_size=layout.world_size,
            stage=rank // (layout.data_parallel_size * tensor),
            stages=layout.pipeline_parallel_size,
            group=tuple(range(first, first + tensor)),
        )

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    def sum(self, x: flow.Tensor) -> flow.Tensor:
        """Sum of `x` over the group, the same to the last bit on each of its processes."""
        if len(self.group) == 1:
            return x
        if len(self.group) == self.world_size:
            return flow._C.local_all_reduce(x)
        parts = self._exchange(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def join(self, x: flow.Tensor, sizes: tuple[int, ...]) -> flow.Tensor:
        """The group's parts (rows, size) side by side; `sizes` are the columns of each."""
        if len(self.group) == 1:
            return x
        return flow.cat(self._exchange(x, sizes), dim=-1)

    def from_previous_stage(self, shape: tuple[int, ...], like: flow.Tensor) -> flow.Tensor:
        """What the process of the same place in the stage before has sent."""
        return self._receive(self.rank - self.stage_size, shape, like)

    def to_next_stage(self, x: flow.Tensor) -> None:
        flow._C.send(x, self.rank + self.stage_size, send_meta=False)

    def share(self, x: flow.Tensor) -> flow.Tensor:
        """`x` of the first process of the last stage, on every process; may overwrite `x`.

        Replicas and shards compute the same, but not on any hardware to the last bit, and processes
        that choose different tokens would wait for each other for ever.
        """
        distributed.broadcast([x], self.world_size - self.stage_size)
        return x

    def _exchange(self, x: flow.Tensor, sizes: tuple[int, ...] | None = None) -> list[flow.Tensor]:
        """The tensors of all processes of the group; `sizes` are their last axes if they differ."""
        parts: list[flow.Tensor] = []
        for index, other in enumerate(self.group):
            if other == self.rank:
                parts.append(x)
                continue
            shape = (*x.shape[:-1], x.shape[-1] if sizes is None else sizes[index])
            # Of a pair the lower rank sends first, and pairs follow one order on all processes:
            # nobody waits in a circle.
            if self.rank < other:
                flow._C.send(x, other, send_meta=False)
                parts.append(self._receive(other, shape, x))
            else:
                parts.append(self._receive(other, shape, x))
                flow._C.send(x, other, send_meta=False)
        return parts

    def _receive(self, source: int, shape: tuple[int, ...], like: flow.Tensor) -> flow.Tensor:
        return flow._C.recv(source, shape, like.dtype, like.device)
