"""What training a model would need: parameters, floating-point operations, memory of a process.

The memory is that of the largest moment of a step, in the backward pass of a block, in float32.
States count parameters exactly, activations those tensors that the backward pass needs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.backends import current_backend
from oneflow_accel.collectives import may_share_memory
from oneflow_accel.errors import UserError

from flow_train.metrics.work import FLOAT32, adamw_states, training_flops, transformer_macs
from monarch_flow.layers import numbers_inside
from vit_10b.model import Shape
from vit_10b.options import Options

GIB = 2**30
# A process that has imported everything and computed nothing, bytes.
PROCESS = 420e6
# What OneFlow's allocator keeps beside the states, as a share of them: it splits a free piece only
# where it is twice the size that is asked for. Measured on CPUs, 0.32 to 0.40 in four runs.
_POOLS = 0.36
# Of the table of largest models: devices, their memory, images of each.
_WORLDS, _MEMORIES, _IMAGES = (1, 2, 4, 8, 16), (16, 24, 40, 80), 8
# Devices are counted up to here; there are none so large.
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """A run of `shape` on `world` processes with `batch` images per step of all together. `group`
    processes share a copy of the model, in one memory if `in_one_memory` (collectives.Window), or
    each has the `whole`; how it is cut the command's options say."""

    shape: Shape
    world: int
    batch: int
    group: int
    options: Options = field(default_factory=Options)
    whole: bool = False
    in_one_memory: bool = False
    # Bytes of a process beside its tensors, where these are in the host's memory.
    process: float = PROCESS

    @classmethod
    def of(cls, options: Options, shape: Shape, world: int) -> Plan:
        """UserError where the batch or the groups do not divide."""
        if options.batch_size % world:
            raise UserError(
                f"--batch_size {options.batch_size} is not a multiple of the {world} processes"
            )
        group = options.shard_group or world
        if world % group:
            raise UserError(f"--shard_group {group} does not divide the {world} processes")
        return cls(
            shape,
            world,
            options.batch_size,
            group,
            options,
            options.run_without_fsdp,
            # Of another number of processes nobody knows on how many machines they are.
            options.gather_dtype == "float32"
            and 1 < world == distributed.local_world_size()
            and may_share_memory(),
            PROCESS if current_backend().supports("host_memory") else 0.0,
        )

    @property
    def recomputes(self) -> bool:
        """Whether blocks are computed again on the way back."""
        return self.options.grad_ckpt and not self.whole

    @property
    def local_batch(self) -> int:
        return self.batch // self.world

    @property
    def own_parameters(self) -> int:
        """Parameters that a process keeps, with the zeros that fill up the last shards."""
        if self.whole:
            return self.shape.parameters
        shape = self.shape
        return shape.num_blocks * self._own(shape.block_sizes) + self._own(shape.root_sizes)

    def _own(self, sizes: list[int]) -> int:
        multiple = self.options.shard_multiple
        every = self.group * multiple
        pieces = [sum(sizes)] if self.options.flatten_parameters else sizes
        return sum(-(-size // every) for size in pieces) * multiple

    def memory(self) -> dict[str, float]:
        """Bytes of a process by category; the categories are there at the same moment."""
        shape, batch = self.shape, self.local_batch
        own, unit, root = self.own_parameters, shape.block_parameters, shape.root_parameters
        states = {
            "process": self.process,
            **adamw_states(own),
            "allocator's pools": _POOLS * (3 if self.in_one_memory else 4) * FLOAT32 * own,
        }
        gathered = 0.0
        if not self.whole:
            reshard = self.options.reshard_after_forward
            kept = unit if reshard else shape.num_blocks * unit
            # Of the block that is differentiated, and of the root.
            gathered = FLOAT32 * (kept + root + unit * (self.options.prefetch and reshard))
            if self.in_one_memory:
                # Without this process's own.
                gathered *= 1 - 1 / self.group
            states["gathered weights"] = gathered
            states["gradients of one block"] = FLOAT32 * unit
        inputs = FLOAT32 * batch * shape.tokens * shape.embed_dim
        # Of an image: two norms' outputs, query, key, value and their copies by head, attention's
        # output twice, the sum; the MLP's hidden layer twice; attention's scores and weights.
        inside = numbers_inside(shape.block_shapes)
        numbers = shape.tokens * (11 * shape.embed_dim + 2 * shape.hidden + inside)
        of_block = FLOAT32 * batch * (numbers + 2 * shape.num_heads * shape.tokens**2)
        states["block inputs"] = shape.num_blocks * inputs
        # Of those that are differentiated, as much again goes backward.
        states["activations"] = (1 if self.recomputes else shape.num_blocks) * of_block + of_block
        return states

    @property
    def bytes(self) -> float:
        return sum(self.memory().values())

    @property
    def flops_per_image(self) -> int:
        """Forward and backward, as a model's work is counted: without computing again."""
        shape = self.shape
        dim, blocks = shape.embed_dim, shape.num_blocks
        # Norms and biases have one axis.
        matrices = (each for each in shape.block_shapes.values() if len(each) > 1)
        weights = blocks * sum(map(math.prod, matrices)) + 3 * shape.patch_size**2 * dim
        of_token = transformer_macs(weights, blocks, dim, shape.tokens)
        return training_flops(shape.tokens * of_token + shape.num_classes * dim)

    @property
    def computed_flops_per_image(self) -> float:
        """With the forward pass that is computed again."""
        return self.flops_per_image * (4 / 3 if self.recomputes else 1)

    def worlds(self) -> Iterator[Plan]:
        """This plan for each number of processes that divides the batch, the smallest first; a
        group of all processes stays one."""
        for world in range(1, min(self.batch, _MOST_DEVICES) + 1):
            if self.batch % world:
                continue
            group = world if self.group == self.world else self.group
            if world % group == 0:
                known = self.in_one_memory and world == self.world
                yield dataclasses.replace(self, world=world, group=group, in_one_memory=known)

    def smallest(self, limit: float) -> Plan | None:
        """The plan with the fewest processes that each fit into `limit` bytes."""
        return next((plan for plan in self.worlds() if plan.bytes <= limit), None)


def report(plan: Plan, limit: float | None, told: bool) -> str:
    """Text for --dry_run. `limit` is a device's memory in bytes, as the user `told` it or not."""
    shape, memory = plan.shape, plan.memory()
    again = f", {plan.computed_flops_per_image / 1e12:,.2f} with what is computed again"
    lines = [
        f"parameters            {shape.parameters:,} = {shape.num_blocks} blocks of "
        f"{shape.block_parameters:,} + {shape.root_parameters:,} around them",
        f"of each process       {plan.own_parameters:,} on {plan.world} processes"
        + ("" if plan.whole or plan.group == plan.world else f" in groups of {plan.group}"),
        f"per image             {plan.flops_per_image / 1e12:,.2f} TFLOP forward and backward"
        + again * plan.recomputes,
        f"per step              {plan.flops_per_image * plan.batch / 1e15:,.2f} PFLOP for "
        f"{plan.batch} images, {plan.local_batch} of each process",
        "memory of a process   GiB",
    ]
    lines += [f"  {name:<22}{size / GIB:10.2f}" for name, size in memory.items()]
    lines.append(f"  {'together':<22}{plan.bytes / GIB:10.2f}")
    unit = max(shape.block_parameters, shape.root_parameters)
    where = "a block" if unit == shape.block_parameters else "what is around the blocks"
    lines.append(f"largest unit          {FLOAT32 * unit / GIB:,.2f} GiB gathered: {where}")
    if limit is not None:
        whose = "a device of" if told else "this machine's share for a process,"
        lines.append(
            f"smallest number       {fewest(plan, limit)} for {whose} {limit / GIB:,.1f} GiB"
        )
    return "\n".join(lines)


def largest(plan: Plan, limit: float) -> float:
    """The parameters of the largest model that fits into `limit` bytes, 0 where none does: with
    more blocks, heads and width in the same proportion."""
    fits, shape = 0, plan.shape
    for blocks in itertools.count(1):
        heads = max(1, round(shape.num_heads * blocks / shape.num_blocks))
        dim = heads * (shape.embed_dim // shape.num_heads)
        grown = dataclasses.replace(shape, num_blocks=blocks, num_heads=heads, embed_dim=dim)
        if dataclasses.replace(plan, shape=grown).bytes > limit:
            break
        fits = grown.parameters
    return fits


def largest_models(plan: Plan) -> str:
    """Text for --largest."""
    sizes = "".join(f"{memory:>8} GiB" for memory in _MEMORIES)
    lines = [f"10^9 parameters of the largest model, {_IMAGES} images of each device, of", sizes]
    for world, whole in ((1, True), *((world, False) for world in _WORLDS)):
        counts: dict[str, Any] = {"world": world, "group": world, "batch": _IMAGES * world}
        each = dataclasses.replace(plan, **counts, whole=whole, in_one_memory=False)
        found = "".join(f"{largest(each, memory * GIB) / 1e9:12.2f}" for memory in _MEMORIES)
        lines.append(found + ("  whole, on any number" if whole else f"  cut over {world}"))
    return "\n".join(lines)


def fewest(plan: Plan, limit: float) -> str:
    found = plan.smallest(limit)
    if found is not None:
        return f"{found.world} processes"
    least = min((each.bytes for each in plan.worlds()), default=math.inf)
    return f"no number of processes ({least / GIB:,.1f} GiB at least)"


def require_memory(plan: Plan, limit: float | None) -> None:
    """UserError, before anything is built, where a process does not fit into `limit` bytes."""
    if limit is None or plan.bytes <= limit:
        return
    raise UserError(
        f"{plan.shape.parameters:,} parameters on {plan.world} processes need "
        f"{plan.bytes / GIB:,.1f} GiB in each, and there are {limit / GIB:,.1f} GiB; "
        f"it takes {fewest(plan, limit)} of such memory, or a smaller model; --dry_run says more"
    )
