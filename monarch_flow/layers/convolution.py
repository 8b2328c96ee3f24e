"""MonarchConv2d: a convolution whose kernel, as a matrix over patches, is a structured one."""

from __future__ import annotations

import math
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.layouts.rules import as_channels_first, as_channels_last

import oneflow as flow
from oneflow import nn

from monarch_flow.layers.config import LinearConfig, LinearLike, twins
from monarch_flow.layers.monarch import MonarchLinear
from monarch_flow.layers.structured import identity


class MonarchConv2d(nn.Conv2d):
    """nn.Conv2d of one group, by its arguments, whose kernel (out_channels, in_channels kh kw) is
    the matrix of `linear`, any layer that LinearConfig knows, and starts as that does.

    Where Monarch blocks divide in_channels nothing is unfolded: block i of the first factor meets
    the i-th group of channels alone, so both factors (Dao et al. 2022, section 3.1) are grouped
    convolutions, kh x kw and 1 x 1. Elsewhere one-hot kernels unfold, if there is need to. Input
    (N, in_channels, H, W), or (N, H, W, in_channels) where `channel_pos` is "channels_last"; output
    likewise. Raises UserError for a wrong config or groups, ValueError for other channels.
    """

    groups: int

    def __init__(self, *args: Any, config: LinearLike = "monarch", **options: Any) -> None:
        super().__init__(*args, **options)
        features = math.prod(self._parameters.pop("weight").shape[1:])
        self.linear = LinearConfig.of(config).build(features, self.out_channels, bias=False)
        if self.groups != 1 or self.linear.bias is not None:
            raise UserError("a structured convolution has one group, and the bias for its layer")
        self.macs_per_position = sum(weight.numel() for weight in self.linear.parameters())
        blocks = self.linear.nblocks if isinstance(self.linear, MonarchLinear) else 0
        self.is_monarch = blocks > 0 and self.in_channels % blocks == 0
        # Of the first operation.
        self.groups = blocks if self.is_monarch else self.in_channels

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        size, last = self.kernel_size, self.channel_pos == "channels_last"
        order, axis = ((0, 2, 3, 1), 3) if last else ((0, 1, 2, 3), 1)
        is_pointwise = size == self.stride == (1, 1) and self.padding == (0, 0)
        if self.is_monarch and not is_pointwise:
            first, second = self.linear.blkdiag1, self.linear.blkdiag2
            options = {"groups": second.shape[0], "channel_pos": self.channel_pos}
            first = first.reshape(-1, self.in_channels // self.groups, *size).permute(*order)
            y = _turned(self._conv_forward(x, first, None), axis, second.shape[2])
            second = second.reshape(-1, second.shape[2], 1, 1).permute(*order)
            y = _turned(flow._C.conv2d(y, second, None, **options), axis, options["groups"])
            y = y.narrow(axis, 0, self.out_channels)
        else:
            if not is_pointwise:
                one_hot = identity(math.prod(size), x).reshape(-1, 1, *size)
                one_hot = one_hot.repeat(self.in_channels, 1, 1, 1).permute(*order)
                x = self._conv_forward(x, one_hot, None)
            y = self.linear(x) if last else as_channels_first(self.linear(as_channels_last(x)))
        ones = (1,) * (3 - axis)
        return y if self.bias is None else y + self.bias.to(y.dtype).reshape(-1, *ones)

    def as_dense(self, linear: nn.Linear) -> nn.Conv2d:
        """The nn.Conv2d whose kernel is the weight of `linear`, as a matrix over patches."""
        conv, kernel = _like(nn.Conv2d, self), linear.weight.detach()
        kernel = kernel.reshape(self.out_channels, -1, *self.kernel_size)
        kernel = as_channels_last(kernel) if self.channel_pos == "channels_last" else kernel
        conv.weight = nn.Parameter(kernel.contiguous(), linear.weight.requires_grad)
        conv.bias = self.bias
        return conv


def _turned(x: flow.Tensor, axis: int, rows: int) -> flow.Tensor:
    """The channels, on this axis, as a grid of so many rows, transposed."""
    grid = x.reshape(*x.shape[:axis], rows, -1, *x.shape[axis + 1 :])
    return grid.transpose(axis, axis + 1).reshape(x.shape)


def _like(cls: type, old: nn.Conv2d, **options: Any) -> nn.Conv2d:
    """A convolution of this class with the sizes and layout of another, and fresh weights."""
    sizes = (old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding)
    new = cls(*sizes, old.dilation, bias=old.bias is not None, **options)
    new.channel_pos, weight = old.channel_pos, next(old.parameters())
    return new.to(weight.device, weight.dtype).train(old.training)


twins[nn.Conv2d] = lambda old, config: _like(MonarchConv2d, old, config=config)
