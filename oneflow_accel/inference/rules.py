"""Which layers of a module class are run one right after the other, so that they can be one.

A class that is not here is left alone, apart from its children: its forward may use a layer's
output twice, or its layers in another order. A Sequential needs no rule. The forwards of
flowvision's classes were read for its release 0.2.1. Convolutions and batch norms of other classes
than OneFlow's are those marked with `map_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from oneflow_accel.kernels.linear import linear
from oneflow_accel.layouts.rules import class_name

import oneflow as flow
from oneflow import nn

LayerClass = TypeVar("LayerClass", bound=type[nn.Conv2d] | type[nn.BatchNorm2d])

_ACTIVATIONS: dict[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu"}
# Classes of ours, which say so themselves.
_map_layers: set[type] = set()


def map_layer(cls: LayerClass) -> LayerClass:
    """Class decorator: these modules compute what nn.Conv2d or nn.BatchNorm2d does with the same
    parameters, but on (N, H, W, C), so that `prepare()` may fold them."""
    _map_layers.add(cls)
    return cls


def is_map_layer(module: nn.Module) -> bool:
    return type(module) in _map_layers


def is_convolution(module: nn.Module | None) -> bool:
    return _is(nn.Conv2d, module)


def is_batch_norm(module: nn.Module | None) -> bool:
    """Whether it is a batch norm that uses running statistics in eval mode."""
    return module is not None and _is(nn.BatchNorm2d, module) and module.running_mean is not None


def _is(cls: type[nn.Module], module: nn.Module | None) -> bool:
    return type(module) is cls or (isinstance(module, cls) and is_map_layer(module))


def activation_of(module: nn.Module | None) -> str:
    """The activation that a convolution can do as well, as `InferenceConv2d` calls it; "" for any
    other module."""
    return _ACTIVATIONS.get(type(module), "")


def is_activation(module: nn.Module | None) -> bool:
    return bool(activation_of(module))


# Forwards of modules whose convolutions do what follows them as well. `self` is a module, or
# nn.Graph's proxy of one: no `super()` here.
def _shortcut(self: Any, x: flow.Tensor) -> flow.Tensor:
    return x if self.downsample is None else self.downsample(x)


def _basic_block(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.conv2(self.conv1(x), _shortcut(self, x))


def _bottleneck(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.conv3(self.conv2(self.conv1(x)), _shortcut(self, x))


def _only_conv(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.conv(x)


def linear_with_bias(self: Any, x: flow.Tensor) -> flow.Tensor:
    return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class FoldRule:
    """How the convolutions of one module class are folded.

    Attributes: chains: names of children, "conv", "conv norm" or "conv norm relu", that its forward
    runs in this order, each on the output of the one before and nowhere else. relu_after: those
    that a relu follows which is not a child of their own. methods: functions that take a method's
    place after folding. kinds: what the first, second and third of a chain must be.
    """

    chains: tuple[str, ...]
    relu_after: tuple[str, ...] = ()
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    kinds: tuple[Callable[[nn.Module | None], bool], ...] = (
        is_convolution,
        is_batch_norm,
        is_activation,
    )


_SE_BLOCK = FoldRule(("conv1 bn1", "conv2 bn2", "conv3 bn3"))

RULES: dict[str, FoldRule] = {
    "flowvision.models.resnet.ResNet": FoldRule(("conv1 bn1 relu",)),
    "flowvision.models.resnet.BasicBlock": FoldRule(
        ("conv1 bn1", "conv2 bn2"), relu_after=("conv1", "conv2"), methods={"forward": _basic_block}
    ),
    "flowvision.models.resnet.Bottleneck": FoldRule(
        ("conv1 bn1", "conv2 bn2", "conv3 bn3"),
        relu_after=("conv1", "conv2", "conv3"),
        methods={"forward": _bottleneck},
    ),
    "flowvision.models.senet.SEBottleneck": _SE_BLOCK,
    "flowvision.models.senet.SEResNetBottleneck": _SE_BLOCK,
    "flowvision.models.senet.SEResNeXtBottleneck": _SE_BLOCK,
    "flowvision.models.googlenet.BasicConv2d": FoldRule(
        ("conv bn",), relu_after=("conv",), methods={"forward": _only_conv}
    ),
    "flowvision.models.inception_v3.BasicConv2d": FoldRule(("conv bn relu",)),
}


def rule_of(module: nn.Module) -> FoldRule | None:
    """The rule for the module's class in either layout, None where there is none."""
    if is_sequential(module):
        return FoldRule(tuple(_chains_of_sequential(module)), kinds=(is_convolution,))
    return RULES.get(class_name(type(module)))


def is_sequential(module: nn.Module) -> bool:
    """Whether it runs its children one after the other: a Sequential, or a subclass."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _chains_of_sequential(module: nn.Module) -> list[str]:
    chains = []
    items = list(module._modules.items())
    for i, (name, child) in enumerate(items):
        if not is_convolution(child):
            continue
        names = [name]
        following = items[i + 1 :]
        if following and is_batch_norm(following[0][1]):
            names.append(following.pop(0)[0])
        if following and is_activation(following[0][1]):
            names.append(following[0][0])
        chains.append(" ".join(names))
    return chains


def with_methods(cls: type, methods: Mapping[str, Callable[..., Any]]) -> type:
    """A subclass of `cls` with these methods; `cls` itself if there are none. A class and not a
    forward in the instance, because nn.Graph calls the class's forward."""
    return _subclass(cls, tuple(sorted(methods.items()))) if methods else cls


def plain_class(cls: type) -> type:
    """The class that `with_methods` was given; `cls` itself if it is not a result of that."""
    return getattr(cls, "_plain_class", cls)


@cache
def _subclass(cls: type, methods: tuple[tuple[str, Callable[..., Any]], ...]) -> type:
    members = {**dict(methods), "_plain_class": cls, "__module__": __name__}
    return type(f"Inference{cls.__name__}", (cls,), members)
