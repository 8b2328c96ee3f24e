"""The model as --evaluate and --benchmark run it."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.backends.base import Backend
from oneflow_accel.inference import prepare

import oneflow as flow
from oneflow import nn

from resnet50_imagenet.benchmark import forward_graph

Output = flow.Tensor | tuple[flow.Tensor, ...]


def inference_model(model: nn.Module, backend: Backend, *, fold: bool, bf16: bool) -> nn.Module:
    """A model in eval mode for inference.

    Args:
        model: local, in either layout; changed to eval mode.
        backend: the device it is on.
        fold: return a copy with batch norm folded into the convolutions.
        bf16: and computing in bfloat16, where the device has it; needs `fold`.
    """
    model = model.eval()
    if not fold:
        return model
    return prepare(model, dtype=flow.bfloat16 if bf16 else None, backend=backend)


def graph_forward(model: nn.Module) -> Callable[[flow.Tensor], Output]:
    """The forward pass of `model` under nn.Graph. A graph is built for one shape: batches of
    another than the first one's, such as the last of a dataset, run eagerly."""
    graph = forward_graph(model)
    shape: tuple[int, ...] | None = None

    def forward(batch: flow.Tensor) -> Output:
        nonlocal shape
        if shape is None:
            shape = tuple(batch.shape)
        return graph(batch) if tuple(batch.shape) == shape else model(batch)

    return forward
