"""Units of global tensors, such as LiBai's: the layouts of OneFlow do what collectives do for local
ones."""

from __future__ import annotations

from collections.abc import Sequence

from oneflow_accel.collectives import Mesh
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.sharding.units import Place, Shard, ShardingOptions, Unit


def make_unit(name: str, module: nn.Module, mesh: Mesh, options: ShardingOptions) -> Unit:
    """Cut a module's tensors, global or local."""
    is_global = any(value.is_global for value in module.parameters())
    return (GlobalUnit if is_global else Unit)(name, module, mesh, options)


class GlobalUnit(Unit):
    """A unit of global tensors that each process has whole. Its shards are global too, split over
    the processes, and so are their gradients: sums over the parts that a global loss is made of."""

    def _prepare(self, places: Sequence[Place], lengths: Sequence[int]) -> None:
        for place in places:
            name, value = place.slot.name, place.value
            if not value.is_global or value.placement != places[0].value.placement:
                raise UserError(f"{name}: a unit's tensors must all be global, of one placement")
            if any(sbp != flow.sbp.broadcast for sbp in value.sbp):
                raise UserError(
                    f"{name} is split by another parallelism already, sbp {value.sbp}: take data "
                    "parallelism alone, or LiBai's train.zero_optimization"
                )
            ranks = sorted(value.placement.ranks.reshape(-1))
            if ranks != list(range(self.mesh.size)) or self.mesh.replicas > 1:
                raise UserError(
                    f"{name} is on {value.placement}: global tensors are cut over all processes "
                    "in one row; take no pipeline stages and no hybrid mesh"
                )
        # Of a unit inside, where this one has no tensor of its own.
        self._placement = next(v.placement for v in self.module.parameters() if v.is_global)
        axes = self._placement.ranks.ndim
        self._split, self._whole = [flow.sbp.split(0)] * axes, [flow.sbp.broadcast] * axes

    def _stored(self, index: int, piece: flow.Tensor) -> flow.Tensor:
        return piece.to_global(placement=self._placement, sbp=self._split)

    def _all_gather(self) -> list[flow.Tensor]:
        found = []
        for shard in self.shards:
            value, dtype = shard.parameter.detach(), self.options.gather_dtype
            sent = value if dtype is None else value.to(dtype)
            whole = sent.to_global(sbp=self._whole).to(value.dtype)
            found += shard.tensors(whole)
        return found

    def _zeros(self, numbers: int, shard: Shard) -> flow.Tensor:
        return flow.zeros(numbers, placement=self._placement, sbp=self._whole)

    def _reduce_scatter(self, bundle: list[Shard], wholes: list[flow.Tensor]) -> list[flow.Tensor]:
        pieces = []
        for shard in bundle:
            whole, length = wholes.pop(0), self.mesh.shards * shard.length
            if length > whole.numel():
                whole = flow.cat([whole, self._zeros(length - whole.numel(), shard)])
            pieces.append(whole.to_global(sbp=self._split))
        return pieces
