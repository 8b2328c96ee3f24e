"""Local models on several processes: gradients are averaged, buffers are process 0's."""

from __future__ import annotations

from typing import Any

from oneflow_accel import distributed

import oneflow as flow
from oneflow import nn


class _DataParallelShell(nn.Module):
    """What DistributedDataParallel hooks into, so that the model inside can also be called without
    collectives: processes evaluate different numbers of batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


def data_parallel(model: nn.Module) -> nn.Module:
    """What to call in training: `model` itself, or where there are several processes a module whose
    backward pass leaves the mean of all processes' gradients in the model's parameters. Parameters
    and buffers become those of process 0. A model can be wrapped once only: its parameters keep the
    hooks."""
    if distributed.world_size() == 1:
        return model
    return flow.nn.parallel.DistributedDataParallel(_DataParallelShell(model))


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process the buffers of process 0. Running statistics are each process's own until
    the next forward pass; evaluation uses the ones that the checkpoint stores, process 0's."""
    if distributed.world_size() > 1:
        for buffer in model.buffers():
            flow._C.comm_broadcast([buffer], inplace=True)
