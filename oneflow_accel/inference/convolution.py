"""A convolution with all that follows it: the operation "conv2d_add_activation", and the layer that
a convolution becomes for inference."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from functools import lru_cache
from typing import Any

from oneflow_accel.backends import current_backend
from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels import plugin
from oneflow_accel.kernels.convolution import channels_last_conv2d
from oneflow_accel.kernels.operators import Operator, needs_gradient
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow
from oneflow import nn

_owners = itertools.count(1)
_operator = Operator(
    "oneflow_accel_conv2d",
    inputs=("in", "weight", "bias", "summand"),
    outputs=("out",),
    attributes={
        "data_format": "string",
        "kernel_size": "list_int32",
        "strides": "list_int32",
        "padding_before": "list_int32",
        "dilation_rate": "list_int32",
        "groups": "int32",
        "activation": "string",
        "owner": "int64",
    },
    optional=("bias", "summand"),
)


def new_owner() -> int:
    """A number for one set of constant weights, which kernels may then keep in a layout of their
    own; to be given back with `release_weights`."""
    return next(_owners)


def release_weights(owner: int) -> None:
    """Drop what kernels keep of an owner's weights: they have changed, or nobody needs them."""
    release = _release_function()
    if release is not None:
        release(owner)


@lru_cache(maxsize=1)
def _release_function() -> ctypes._NamedFuncPointer | None:
    if _operator.missing_reasons():
        return None
    function = ctypes.CDLL(str(plugin.state().path)).oneflow_accel_release_weights
    function.argtypes, function.restype = [ctypes.c_int64], None
    return function


def _reference(
    x: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor | None,
    summand: flow.Tensor | None,
    *,
    data_format: str,
    activation: str,
    owner: int,
    **geometry: Any,
) -> flow.Tensor:
    if data_format == "channels_last" and not current_backend().supports("nhwc"):
        # A map layer's, which a device needs no channels-last kernels for.
        y = channels_last_conv2d(x, weight.permute(0, 3, 1, 2), bias, **geometry)
    else:
        y = flow._C.conv2d(x, weight, bias, **geometry, channel_pos=data_format)
    if summand is not None:
        y = y + summand
    return getattr(flow, activation)(y) if activation else y


conv2d_add_activation = register_operation(
    "conv2d_add_activation",
    reference=_reference,
    doc="relu or silu of conv2d(x, weight) + bias + summand for inference, all but the convolution "
    "optional",
    lacks={
        CudaBackend.name: "OneFlow 0.9.0 joins no convolution with what follows it: cuDNN's, then "
        "the sum and the activation",
        MluBackend.name: "oneflow_mlu joins no convolution with what follows it: one after another",
    },
)


def _not_supported_reasons(*tensors: flow.Tensor | None, **_attributes: object) -> list[str]:
    if needs_gradient(*tensors):
        return ["it has no gradient, which an argument requires"]
    return []


@implementation(
    "conv2d_add_activation",
    backend=CpuBackend.name,
    dtypes=(flow.float32, flow.bfloat16),
    missing_reasons=_operator.missing_reasons,
    not_supported_reasons=_not_supported_reasons,
)
def onednn(
    x: flow.Tensor, weight: flow.Tensor, *others: flow.Tensor | None, **attributes: Any
) -> flow.Tensor:
    first = 1 if attributes["data_format"] == "channels_last" else 2
    (y,) = _operator(
        x,
        weight,
        *others,
        data_format=attributes["data_format"],
        kernel_size=tuple(weight.shape[first : first + 2]),
        strides=attributes["stride"],
        padding_before=attributes["padding"],
        dilation_rate=attributes["dilation"],
        groups=attributes["groups"],
        activation=attributes["activation"],
        owner=attributes["owner"],
    )
    return y


_GEOMETRY = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "padding_mode",
    "dilation",
    "groups",
    "out_channel_groups",
    "channel_pos",
)


class InferenceConv2d(nn.Conv2d):
    """f(conv2d(x) + bias + summand) with constant weights: the geometry of `conv`, a weight in its
    layout, a bias (out_channels,), and f "relu" or "silu", "" for nothing.

    Kernels keep the weights in a layout of their own, and look for new ones after load_state_dict
    and whatever moves or converts a module (to, to_global, float, ...), but not after values have
    been changed in place.
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

    def _apply(self, fn: Any) -> nn.Module:
        release_weights(self.owner)
        return super()._apply(fn)

    def _load_from_state_dict(self, *args: Any) -> None:
        release_weights(self.owner)
        super()._load_from_state_dict(*args)
