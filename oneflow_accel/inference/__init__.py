"""Models for inference: folded, and in bfloat16 where the device has it."""

from __future__ import annotations

import copy

from oneflow_accel.backends import Backend, current_backend
from oneflow_accel.errors import UserError
from oneflow_accel.inference.bfloat16 import bfloat16_container, in_bfloat16
from oneflow_accel.inference.folding import folded, map_layer

import oneflow as flow
from oneflow import nn

__all__ = ["bfloat16_container", "map_layer", "prepare"]


def prepare(
    model: nn.Module, dtype: flow.dtype | None = None, backend: Backend | None = None
) -> nn.Module:
    """A copy of a model that is faster at inference and gives the same outputs.

    Convolution, batch norm, the addition of a residual branch and relu or silu become one operator
    where they follow each other: in every Sequential, and in the module classes of `folding.py`. So
    do layers on (N, H, W, C) that `map_layer` marks. A linear layer adds its bias in the same pass.
    What is not known there stays as it is. The copy is in eval mode, requires no gradients, and
    does not follow later changes of the model; its state dict is its own. It can be called, or be
    built into an nn.Graph.

    Convert the model to channels last before, where that is wanted; make it global after. `dtype`
    oneflow.bfloat16 computes in bfloat16 what has kernels for it; input and output of the copy stay
    float32. Where the device (None: the selected one) has none, one log line says so.

    Raises:
        UserError: the model is global, or has forward hooks, which a copy would lose.
        ValueError: another dtype.
    """
    if dtype not in (None, flow.float32, flow.bfloat16):
        raise ValueError(f"inference in {dtype}: choose oneflow.float32 or oneflow.bfloat16")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise UserError(
                f"{name or 'the model'} has forward hooks, which would see other values, or none: "
                "register them on what prepare() returns"
            )
    if any(tensor.is_global for tensor in (*model.parameters(), *model.buffers())):
        raise UserError("the model is global: prepare it before .to_global()")
    prepared = folded(copy.deepcopy(model).eval(), {}).eval()
    for parameter in prepared.parameters():
        parameter.requires_grad_(False)
    if dtype == flow.bfloat16:
        prepared = in_bfloat16(prepared, backend or current_backend())
    return prepared
