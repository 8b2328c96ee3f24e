"""Convolution and batch norm of maps (N, H, W, C), with the parameters of OneFlow's own.

`oneflow_accel.inference.prepare()` makes one layer of a convolution and the batch norm and SiLU
after it, in float32 or bfloat16.
"""

from __future__ import annotations

from oneflow_accel.backends import current_backend
from oneflow_accel.inference import map_layer
from oneflow_accel.kernels.convolution import channels_last_conv2d

import oneflow as flow
from oneflow import nn


@map_layer
class MapConv2d(nn.Conv2d):
    """nn.Conv2d that takes and returns (N, H, W, C). Its weight is (O, C / groups, h, w)."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return channels_last_conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


@map_layer
class MapBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d that takes and returns (N, H, W, C)."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.channel_axis = 3

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        if self.training or current_backend().supports("nhwc"):
            # No super(): under nn.Graph `self` is a proxy of the module.
            return nn.BatchNorm2d.forward(self, x)
        # OneFlow's own kernel for CPUs ends the process here.
        scale = self.weight * flow.rsqrt(self.running_var + self.eps)
        return (x - self.running_mean) * scale + self.bias
