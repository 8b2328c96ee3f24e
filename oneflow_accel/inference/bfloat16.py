"""A model that takes and returns float32 and computes in bfloat16 between.

An allow-list by class: `_CONTAINERS`, and classes marked with `bfloat16_container`, run their
children and operators that have bfloat16 kernels; `_LAYERS` are such operators. Any other module
computes in float32 with all that is in it, and casts what it gets and returns.

All convolutions are among them. Two kinds gain nothing by it, measured on a Xeon with AMX: those of
a few channels a group take as long (their sums are float32 ones, and only what is read and written
is smaller), and dilated ones of three channels take 1.5 times as long: casts to float32 and back
would eat most of the difference up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from oneflow_accel.backends import Backend
from oneflow_accel.inference.folding import (
    InferenceConv2d,
    is_sequential,
    plain_class,
    with_forward,
)
from oneflow_accel.kernels.transformer import SiLU
from oneflow_accel.layouts.rules import class_name

import oneflow as flow
from oneflow import nn

logger = logging.getLogger("oneflow_accel")

ModuleClass = TypeVar("ModuleClass", bound=type)

_CONTAINERS = frozenset(
    f"flowvision.{name}"
    for name in (
        "models.resnet.ResNet",
        "models.resnet.BasicBlock",
        "models.resnet.Bottleneck",
        "models.vgg.VGG",
        "models.vision_transformer.VisionTransformer",
        "models.vision_transformer.Block",
        "models.vision_transformer.Attention",
        "layers.blocks.patch_embed.PatchEmbed",
        "layers.blocks.mlp.Mlp",
    )
)
# Classes of ours, which say so themselves.
_marked: set[type] = set()
_LAYERS = (
    *(nn.Linear, nn.LayerNorm, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.ReLU, nn.GELU, nn.SiLU, SiLU, nn.Flatten, nn.Identity, nn.Dropout),
)


def bfloat16_container(cls: ModuleClass) -> ModuleClass:
    """Class decorator: the forward of these modules calls nothing but their children and operators
    that have bfloat16 kernels, so `prepare(model, dtype=oneflow.bfloat16)` may convert them."""
    _marked.add(cls)
    return cls


def in_bfloat16(model: nn.Module, backend: Backend) -> nn.Module:
    """Convert a model (local float32 parameters, folded) for inference, in place. Where the device
    or the model cannot, it stays as it is, and one log line says why."""
    support = backend.supports("bfloat16_inference")
    if not support:
        logger.warning("inference runs in float32 and not in bfloat16: %s", support.reason)
        return model
    if not (_is_container(model) or _is_layer(model)):
        logger.warning(
            "inference runs in float32 and not in bfloat16: %s is not a class whose forward is "
            "known to have bfloat16 kernels only "
            "(oneflow_accel.inference.bfloat16_container marks it)",
            class_name(plain_class(type(model))),
        )
        return model
    _convert(model, set())
    _compute_in(flow.bfloat16, model, outside=flow.float32)
    return model


def _is_container(module: nn.Module) -> bool:
    # Nobody calls a list of modules but its members.
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    cls = plain_class(type(module))
    return is_sequential(module) or cls in _marked or class_name(cls) in _CONTAINERS


def _is_layer(module: nn.Module) -> bool:
    # Not their channels-last subclasses, whose forwards are made of other operators.
    return plain_class(type(module)) in _LAYERS or type(module) is InferenceConv2d


def _convert(module: nn.Module, done: set[nn.Module]) -> None:
    if module in done:
        return
    done.add(module)
    container = _is_container(module)
    if not (container or _is_layer(module)):
        _compute_in(flow.float32, module, outside=flow.bfloat16)
        return
    for name, parameter in module._parameters.items():
        # The bias of a convolution is added to float32 sums.
        keeps = isinstance(module, InferenceConv2d) and name == "bias"
        if parameter is not None and not keeps:
            value = parameter.detach().to(flow.bfloat16)
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
    for name, buffer in module._buffers.items():
        module._buffers[name] = _cast(buffer, flow.bfloat16)
    if container:
        for child in module._modules.values():
            if child is not None:
                _convert(child, done)


def _compute_in(dtype: flow.dtype, module: nn.Module, outside: flow.dtype) -> None:
    cls: Any = type(module)
    module.__class__ = with_forward(cls, _casting(cls, dtype, outside))


@cache
def _casting(cls: Any, inside: flow.dtype, outside: flow.dtype) -> Callable[..., Any]:
    """The forward of `cls` on floating-point tensors cast to `inside`, its result to `outside`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _cast(cls.forward(self, *_cast(args, inside), **_cast(kwargs, inside)), outside)

    return forward


def _cast(value: Any, dtype: flow.dtype) -> Any:
    """`value` with every floating-point tensor in it, at any depth, in `dtype`."""
    if isinstance(value, flow.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(element, dtype) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(element, dtype) for element in value)
    return value
