"""Who this process is in a job of `oneflow.distributed.launch`, and sums over all processes.

Without a launcher oneflow reports one process of rank 0, and every function here works the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import oneflow as flow


def rank() -> int:
    """Index of this process among all processes of the job."""
    return int(flow.env.get_rank())


def world_size() -> int:
    """Number of processes of the job, over all nodes."""
    return int(flow.env.get_world_size())


def local_rank() -> int:
    """Index of this process on its node; the index of the device it uses."""
    return int(flow.env.get_local_rank())


def local_world_size() -> int:
    """Number of processes on this node; the launcher starts the same number on each."""
    return world_size() // int(flow.env.get_node_size())


def is_main() -> bool:
    """Whether this is the one process that logs and writes checkpoints."""
    return rank() == 0


def all_reduce_sum(numbers: Sequence[float]) -> list[float]:
    """Sum each number over all processes; every process gets the same result.

    The sum goes through host memory in float64, whatever the device: counts of images stay exact
    and no device needs float64 for it.
    """
    if world_size() == 1 or not numbers:
        return [float(number) for number in numbers]
    total = flow.tensor(np.asarray(numbers, dtype=np.float64))
    flow.comm.all_reduce(total)
    return [float(number) for number in total.numpy()]


def all_gather_json(value: Any) -> list[Any]:
    """Collect one JSON value per process, in the order of ranks, on every process."""
    if world_size() == 1:
        return [value]
    text = json.dumps(value).encode()
    lengths = [0.0] * world_size()
    lengths[rank()] = float(len(text))
    lengths = all_reduce_sum(lengths)
    # Each process fills its own row of zeros, so that the sum is the concatenation.
    rows = np.zeros((world_size(), int(max(lengths))), dtype=np.int32)
    rows[rank(), : len(text)] = np.frombuffer(text, dtype=np.uint8)
    gathered = flow.tensor(rows)
    flow.comm.all_reduce(gathered)
    return [
        json.loads(row[: int(length)].astype(np.uint8).tobytes())
        for row, length in zip(gathered.numpy(), lengths, strict=True)
    ]


def set_value(tensor: flow.Tensor, array: np.ndarray) -> None:
    """Give a local or global tensor the value of an array (of its logical shape, of any dtype) that
    all processes have: each copies its own part, and they exchange nothing.

    Raises:
        ValueError: it has another shape, or the tensor is a partial sum.
    """
    if array.shape != tuple(tensor.shape):
        raise ValueError(f"an array of shape {array.shape} for a tensor of {tuple(tensor.shape)}")
    part: np.ndarray | None = array
    if tensor.is_global:
        part = _own_part(array, tensor.placement, tensor.sbp)
    if part is not None:
        # It shares the memory of the global one.
        local = tensor.detach().to_local() if tensor.is_global else tensor.detach()
        part = np.asarray(part, order="C")
        local.copy_(flow.tensor(part, dtype=local.dtype, device=local.device))


def _own_part(
    array: np.ndarray, placement: flow.placement, sbp: Sequence[flow.sbp.sbp]
) -> np.ndarray | None:
    """What this process has of it; None where it is not of the placement."""
    ranks = np.asarray(placement.ranks)
    own = np.argwhere(ranks == rank())
    if not len(own):
        return None
    for count, place, layout in zip(ranks.shape, own[0], sbp, strict=True):
        axes = [axis for axis in range(array.ndim) if layout == flow.sbp.split(axis)]
        if axes:
            # OneFlow shares out as NumPy does: the first parts are the larger ones.
            array = np.array_split(array, count, axes[0])[place]
        elif layout != flow.sbp.broadcast:
            raise ValueError(f"a tensor of layout {layout} has no parts to set")
    return array


def broadcast(tensors: Iterable[flow.Tensor], source: int = 0) -> None:
    """Give local tensors, in place, the values of those of process `source`; a collective call."""
    if world_size() > 1:
        for tensor in tensors:
            # Of one that is not in a list, OneFlow takes CPUs' and GPUs' only.
            flow._C.comm_broadcast([tensor], src_rank=source, inplace=True)


def barrier() -> None:
    """Wait until every process got here. Oneflow's own barrier would not say whom it waits for."""
    all_reduce_sum([0.0])


def settle() -> None:
    """Wait until the kernels of every process are done, before something lasting is made of their
    results. Every process calls it, and none gets beyond it if a kernel has failed (IndexError or
    RuntimeError there)."""
    flow._oneflow_internal.eager.Sync()
    barrier()


def end_graph(graph: flow.nn.Graph) -> None:
    """Free a graph that runs no more, compiled or not; a collective call.

    A graph waits at its end for those of the other processes. One that is left to Python's garbage
    collector does so whenever that runs in its process, while the others wait for this one.
    """
    flow._oneflow_internal.eager.Sync()
    graph._c_nn_graph = None
