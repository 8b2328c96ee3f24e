"""Makes a model's copy for inference."""

from __future__ import annotations

import copy

from oneflow_accel.backends import Backend, current_backend
from oneflow_accel.errors import UserError
from oneflow_accel.inference.bfloat16 import in_bfloat16
from oneflow_accel.inference.convolution import InferenceConv2d
from oneflow_accel.inference.rules import (
    FoldRule,
    activation_of,
    is_batch_norm,
    is_convolution,
    is_map_layer,
    linear_with_bias,
    rule_of,
    with_methods,
)

import numpy as np
import oneflow as flow
from oneflow import nn


def prepare(
    model: nn.Module, dtype: flow.dtype | None = None, backend: Backend | None = None
) -> nn.Module:
    """A copy of a model that is faster at inference and gives the same outputs.

    Convolution, batch norm, the addition of a residual branch and relu or silu become one operator
    where they follow each other: in every Sequential, and in the module classes of `rules.py`. So
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
    prepared = _folded(copy.deepcopy(model).eval(), {}).eval()
    for parameter in prepared.parameters():
        parameter.requires_grad_(False)
    if dtype == flow.bfloat16:
        prepared = in_bfloat16(prepared, backend or current_backend())
    return prepared


def _folded(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module, or what takes its place. `done` holds for each module what has taken its place:
    one module may stand in several places. It holds the modules and not their ids, because an id
    is given to a new object once the old one is gone."""
    if module in done:
        return done[module]
    done[module] = module
    if is_convolution(module):
        done[module] = fold(module, None, "")
        return done[module]
    if type(module) is nn.Linear and module.bias is not None:
        module.__class__ = with_methods(nn.Linear, {"forward": linear_with_bias})
    rule = rule_of(module)
    if rule is not None and _fits(module, rule):
        for chain in rule.chains:
            names = chain.split()
            _fold_chain(module, names, "relu" if names[0] in rule.relu_after else "")
        module.__class__ = with_methods(type(module), rule.methods)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _folded(child, done)
    return module


def _fits(module: nn.Module, rule: FoldRule) -> bool:
    """Whether the children are what the rule was written for: a model may be built with another
    normalization than batch norm, and one of its layers may have been replaced."""
    return "forward" not in vars(module) and all(
        is_kind(module._modules.get(name))
        for chain in rule.chains
        for name, is_kind in zip(chain.split(), rule.kinds, strict=False)
    )


def _fold_chain(module: nn.Module, names: list[str], activation: str) -> None:
    """Put one layer in the place of the first of these children, nothing in that of the others.
    `activation` follows them, if none of them is one."""
    conv, *others = (module._modules[name] for name in names)
    norm = next(filter(is_batch_norm, others), None)
    activation = next(filter(None, map(activation_of, others)), activation)
    module._modules[names[0]] = fold(conv, norm, activation)
    for name in names[1:]:
        module._modules[name] = nn.Identity()


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
