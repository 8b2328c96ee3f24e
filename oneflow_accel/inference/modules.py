"""The layer that a convolution becomes for inference."""

from __future__ import annotations

import weakref
from typing import Any

from oneflow_accel.inference.convolution import conv2d_add_activation, new_owner, release_weights

import oneflow as flow
from oneflow import nn

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
