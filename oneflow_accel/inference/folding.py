"""Batch norm folded into the convolution before it."""

from __future__ import annotations

from oneflow_accel.inference.modules import InferenceConv2d
from oneflow_accel.inference.rules import is_map_layer

import numpy as np
import oneflow as flow
from oneflow import nn


def fold(conv: nn.Conv2d, norm: nn.BatchNorm2d | None, activation: str) -> InferenceConv2d:
    """One layer that computes what a convolution (with local parameters, in either layout, or a map
    layer), a batch norm and the activation of this name do in eval mode.

    With scale = gamma / sqrt(variance + eps), for each output channel: weight' = scale * weight,
    bias' = scale * (bias - mean) + beta; computed at float64.
    """
    if norm is None:
        bias = None if conv.bias is None else conv.bias.detach().clone()
        return _layer(conv, conv.weight.detach().clone(), bias, activation)
    scale = 1 / np.sqrt(_float64(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * _float64(norm.weight)
    bias = -scale * _float64(norm.running_mean)
    if conv.bias is not None:
        bias = bias + scale * _float64(conv.bias)
    if norm.bias is not None:
        bias = bias + _float64(norm.bias)
    weight = scale.reshape(-1, 1, 1, 1) * _float64(conv.weight)
    return _layer(conv, _like(conv.weight, weight), _like(conv.weight, bias), activation)


def _layer(
    conv: nn.Conv2d, weight: flow.Tensor, bias: flow.Tensor | None, activation: str
) -> InferenceConv2d:
    layer = InferenceConv2d(conv, weight, bias, activation)
    if is_map_layer(conv):
        # Its weight has the order of checkpoints, (O, C, h, w), whatever that of its activations.
        layer.weight = nn.Parameter(weight.permute(0, 2, 3, 1).contiguous(), requires_grad=False)
        layer.channel_pos = "channels_last"
    return layer


def _float64(tensor: flow.Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def _like(tensor: flow.Tensor, array: np.ndarray) -> flow.Tensor:
    return flow.tensor(array, dtype=tensor.dtype, device=tensor.device)
