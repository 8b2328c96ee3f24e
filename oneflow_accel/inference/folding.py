"""Folds what follows a convolution into it, for inference.

`RULES` says which layers of a module class are run one right after the other, so that they can be
one. A class that is not there is left alone, apart from its children: its forward may use a layer's
output twice, or its layers in another order. A Sequential needs no rule. The forwards of
flowvision's classes were read for its release 0.2.1. Convolutions and batch norms of other classes
than OneFlow's are those marked with `map_layer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from oneflow_accel.kernels.convolution import conv2d_add_activation, new_owner, release_weights
from oneflow_accel.kernels.linear import linear
from oneflow_accel.kernels.transformer import SiLU
from oneflow_accel.layouts.rules import class_name

import numpy as np
import oneflow as flow
from oneflow import nn

LayerClass = TypeVar("LayerClass", bound=type[nn.Conv2d] | type[nn.BatchNorm2d])

_ACTIVATIONS: dict[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu", SiLU: "silu"}
# Classes of ours, which say so themselves.
_map_layers: set[type] = set()


def map_layer(cls: LayerClass) -> LayerClass:
    """Class decorator: these modules compute what nn.Conv2d or nn.BatchNorm2d does with the same
    parameters, but on (N, H, W, C), so that `prepare()` may fold them."""
    _map_layers.add(cls)
    return cls


def is_convolution(module: nn.Module | None) -> bool:
    return _is(nn.Conv2d, module)


def is_batch_norm(module: nn.Module | None) -> bool:
    """Whether it is a batch norm that uses running statistics in eval mode."""
    return module is not None and _is(nn.BatchNorm2d, module) and module.running_mean is not None


def _is(cls: type[nn.Module], module: nn.Module | None) -> bool:
    return type(module) is cls or (isinstance(module, cls) and type(module) in _map_layers)


def activation_of(module: nn.Module | None) -> str:
    """The activation that a convolution can do as well, as `InferenceConv2d` calls it; "" for any
    other module."""
    return _ACTIVATIONS.get(type(module), "")


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
    that a relu follows which is not a child of their own. forward: what takes the place of their
    forward after folding. kinds: what the first, second and third of a chain must be.
    """

    chains: tuple[str, ...]
    relu_after: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    kinds: tuple[Callable[[nn.Module | None], Any], ...] = (
        is_convolution,
        is_batch_norm,
        activation_of,
    )


_SE_BLOCK = FoldRule(("conv1 bn1", "conv2 bn2", "conv3 bn3"))

RULES: dict[str, FoldRule] = {
    "flowvision.models.resnet.ResNet": FoldRule(("conv1 bn1 relu",)),
    "flowvision.models.resnet.BasicBlock": FoldRule(
        ("conv1 bn1", "conv2 bn2"), relu_after=("conv1", "conv2"), forward=_basic_block
    ),
    "flowvision.models.resnet.Bottleneck": FoldRule(
        ("conv1 bn1", "conv2 bn2", "conv3 bn3"),
        relu_after=("conv1", "conv2", "conv3"),
        forward=_bottleneck,
    ),
    "flowvision.models.senet.SEBottleneck": _SE_BLOCK,
    "flowvision.models.senet.SEResNetBottleneck": _SE_BLOCK,
    "flowvision.models.senet.SEResNeXtBottleneck": _SE_BLOCK,
    "flowvision.models.googlenet.BasicConv2d": FoldRule(
        ("conv bn",), relu_after=("conv",), forward=_only_conv
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
        if following and activation_of(following[0][1]):
            names.append(following[0][0])
        chains.append(" ".join(names))
    return chains


@cache
def with_forward(cls: type, forward: Callable[..., Any]) -> type:
    """A subclass of `cls` with this forward. A class and not a forward in the instance, because
    nn.Graph calls the class's forward."""
    members = {"forward": forward, "_plain_class": cls, "__module__": __name__}
    return type(f"Inference{cls.__name__}", (cls,), members)


def plain_class(cls: type) -> type:
    """The class that `with_forward` was given; `cls` itself if it is not a result of that."""
    return getattr(cls, "_plain_class", cls)


_GEOMETRY = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "padding_mode"),
    *("dilation", "groups", "out_channel_groups", "channel_pos"),
)


class InferenceConv2d(nn.Conv2d):
    """f(conv2d(x) + bias + summand) for inference: the geometry of `conv`, a weight in its
    layout, a bias (out_channels,), and f "relu" or "silu", "" for nothing.

    Kernels keep the weights in a layout of their own until a kernel or copy_() writes to them. What
    NumPy writes to the memory of `weight.numpy()` they do not see.
    """

    def __init__(
        self, conv: nn.Conv2d, weight: flow.Tensor, bias: flow.Tensor | None, activation: str
    ) -> None:
        # Not nn.Conv2d's, which would make weights.
        nn.Module.__init__(self)
        for name in _GEOMETRY:
            setattr(self, name, getattr(conv, name))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.activation = activation
        self.training = False
        self._own_weights()

    def forward(self, x: flow.Tensor, summand: flow.Tensor | None = None) -> flow.Tensor:
        """x and the result in the layout and dtype of the weight; summand like the result."""
        return conv2d_add_activation(
            x,
            self.weight,
            self.bias,
            summand,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            data_format=self.channel_pos,
            activation=self.activation,
            owner=self.owner,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", {self.activation}" if self.activation else "")

    def _own_weights(self) -> None:
        self.owner = new_owner()
        weakref.finalize(self, release_weights, self.owner)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy's weights are its own.
        self._own_weights()


def folded(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module, or what takes its place. `done` holds for each module what has taken its place:
    one module may stand in several places. It holds the modules and not their ids, because an id
    is given to a new object once the old one is gone."""
    if module in done:
        return done[module]
    done[module] = module
    if is_convolution(module):
        done[module] = fold(module, None, "")
        return done[module]
    cls: Any = type(module)
    if cls is nn.Linear and module.bias is not None:
        module.__class__ = with_forward(cls, linear_with_bias)
    rule = rule_of(module)
    if rule is not None and _fits(module, rule):
        for chain in rule.chains:
            names = chain.split()
            _fold_chain(module, names, "relu" if names[0] in rule.relu_after else "")
        if rule.forward is not None:
            module.__class__ = with_forward(cls, rule.forward)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = folded(child, done)
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
    if type(conv) in _map_layers:
        # Its weight has the order of checkpoints, (O, C, h, w), whatever that of its activations.
        layer.weight = nn.Parameter(weight.permute(0, 2, 3, 1).contiguous(), requires_grad=False)
        layer.channel_pos = "channels_last"
    return layer


def _float64(tensor: flow.Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def _like(tensor: flow.Tensor, array: np.ndarray) -> flow.Tensor:
    return flow.tensor(array, dtype=tensor.dtype, device=tensor.device)
