"""Collectives on flat local tensors over a mesh of processes: pieces of tensors are gathered and
summed along one of its axes, and copies are kept equal along the other. On CPUs of one machine the
pieces can lie in one memory, a `Window`, where nothing has to be sent.

OneFlow 0.9.0 has collectives of all processes of a job. Those of a row of the mesh are changes of
the layout of a global tensor that lives on the whole mesh. Sums are taken in float32: a CPU's
reductions know neither float16 nor bfloat16, and end the process.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel import distributed, settings
from oneflow_accel.backends import current_backend, delegate_of
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.operators import Operator

import numpy as np
import oneflow as flow

# Of this start of this machine's system.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BYTES, _ALIGNED = 4, 16
_drop_pages = Operator("oneflow_accel_drop_pages", ("x",), ("done",), {"bytes": "list_int64"})
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
            # Autocast would send bfloat16 as float32, which is not what `whole` is to hold.
            is_on = flow.is_autocast_enabled()
            kind = delegate_of(piece.device.type)
            with flow.autocast(kind, enabled=False) if is_on else nullcontext():
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


class Window:
    """Float32 tensors in one memory of the processes of a mesh's row. Each writes its own pieces
    and reads all; nothing is sent. `mesh`, and `lengths`, numbers in a piece of each tensor.

    Processes keep their order by `meet`, a collective call: what a process has asked of the windows
    before it is done in all processes before anything runs that is asked for after it. So they meet
    between writing and reading, and between reading and writing anew, unless there is another
    collective in between whose input was computed after the reading.
    """

    def __init__(self, mesh: Mesh, lengths: Sequence[int], memory: mmap.mmap) -> None:
        self.mesh, self.lengths = mesh, list(lengths)
        self._memory = flow.from_numpy(np.frombuffer(memory, dtype=np.float32))
        self._starts, end = _starts(mesh, lengths)
        self._tokens = self._memory[end : end + mesh.shards]
        self._own_token = self._tokens[mesh.place :][:1]
        self._others = self._parts_of_others()

    @classmethod
    def of(cls, mesh: Mesh, lengths: Sequence[int], device: flow.device) -> Window | None:
        """A new one; None, for all processes, where some process of a row cannot have it: they are
        on several machines, ONEFLOW_ACCEL_SHARED_MEMORY is off, the device has memory of its own.
        A collective call of all processes of the mesh."""
        backend = current_backend()
        if mesh.shards == 1 or not backend.shares_memory or device.type != backend.name:
            return None
        numbers = _starts(mesh, lengths)[1] + mesh.shards
        memory = _common_memory(mesh, _BYTES * numbers)
        return None if memory is None else cls(mesh, lengths, memory)

    def whole(self, index: int) -> flow.Tensor:
        """One of the tensors, (shards length,); changes with its pieces."""
        start = self._starts[index]
        return self._memory[start : start + self.mesh.shards * self.lengths[index]]

    def own(self, index: int) -> flow.Tensor:
        """This process's piece of it, (length,)."""
        return self.whole(index)[self.mesh.place * self.lengths[index] :][: self.lengths[index]]

    @staticmethod
    def meet(windows: Sequence[Window]) -> None:
        """See above; windows of one mesh."""
        if not windows:
            return
        with flow.no_grad():
            # Written, these wait for what has been asked of the memory before, and hold up what is
            # asked of it after.
            for window in windows:
                window._own_token.zero_()
            mesh = windows[0].mesh
            met = mesh.gather(flow.cat([window._own_token for window in windows]))[: mesh.shards]
            for window in windows:
                window._tokens.copy_(met)

    def drop(self) -> None:
        """Count the others' pieces no more among this process's memory, once it has done what was
        asked for before; they come back as they are read. Nothing without the plug-in."""
        if self._others and not _drop_pages.missing_reasons():
            _drop_pages(self._memory, bytes=self._others)

    def _parts_of_others(self) -> list[int]:
        """Where each begins and ends, in bytes."""
        found = []
        for start, length in zip(self._starts, self.lengths, strict=True):
            own, end = start + self.mesh.place * length, start + self.mesh.shards * length
            for part in (start, own), (own + length, end):
                if part[1] - part[0] >= mmap.PAGESIZE // _BYTES:
                    found += [_BYTES * part[0], _BYTES * part[1]]
        return found


def may_share_memory() -> bool:
    """Whether this process's device and settings let it have a window with others."""
    return current_backend().shares_memory and settings.SHARED_MEMORY.get() != "off"


def _starts(mesh: Mesh, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of such pieces begin, and where the last one ends."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-mesh.shards * length // _ALIGNED) * _ALIGNED
    return starts, end


def _common_memory(mesh: Mesh, size: int) -> mmap.mmap | None:
    """`size` bytes that the processes of a row have in common; None for all where one has not."""
    name = f"oneflow_accel_{uuid.uuid4().hex}"
    file = None
    if mesh.place == 0 and may_share_memory():
        # A file without a name in any folder, which ends with the processes that have it; without
        # one, the others are told none.
        with suppress(OSError):
            file = os.memfd_create(name)
            os.truncate(file, size)
    boot, path = _BOOT.read_text(), f"/proc/{os.getpid()}/fd/{file}"
    all_told = distributed.all_gather_json([boot, name, path])
    its_boot, its_name, its_path = all_told[distributed.rank() - mesh.place]
    memory = None
    if may_share_memory() and its_boot == boot:
        memory = _opened(its_name, its_path, size)
    everywhere = all(distributed.all_gather_json(memory is not None))
    if file is not None:
        os.close(file)
    return memory if everywhere else None


def _opened(name: str, path: str, size: int) -> mmap.mmap | None:
    try:
        # In a container that is not the other's, the path may be of another file.
        if name not in os.readlink(path):
            return None
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None
