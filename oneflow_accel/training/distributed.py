"""Who this process is in a job of `oneflow.distributed.launch`, and sums over all processes.

Without a launcher oneflow reports one process of rank 0, and every function here works the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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

    Args:
        numbers: as many on every process.
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


def local_value(tensor: flow.Tensor) -> flow.Tensor:
    """The whole value of a global tensor as a local one; a local tensor as it is.

    For a global tensor every process of its placement has to call this.
    """
    if not tensor.is_global:
        return tensor
    return tensor.to_global(sbp=[flow.sbp.broadcast] * len(tensor.sbp)).to_local()


def barrier() -> None:
    """Wait until every process got here."""
    if world_size() > 1:
        flow.comm.barrier()
