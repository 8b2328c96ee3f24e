"""MonarchConv2d: a convolution whose kernel, as a matrix over patches, is a structured one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.layouts.rules import as_channels_first, as_channels_last

import oneflow as flow
from oneflow import nn

from monarch_flow.layers.config import LinearConfig, LinearLike, replace_layers
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

    def __init__(self, *args: Any, config: LinearLike = "monarch", **options: Any) -> None:
        super().__init__(*args, **options)
        features = math.prod(self._parameters.pop("weight").shape[1:])
        self.linear = LinearConfig.of(config).build(features, self.out_channels, bias=False)
        if self.groups != 1 or self.linear.bias is not None:
            raise UserError("a structured convolution has one group, and the bias for its layer")
        blocks = self.linear.nblocks if isinstance(self.linear, MonarchLinear) else 0
        self.has_grouped_factors = blocks > 0 and self.in_channels % blocks == 0
        # Of the first operation, whatever it is.
        self.groups = blocks if self.has_grouped_factors else self.in_channels

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        last, size = self.channel_pos == "channels_last", self.kernel_size
        if size == self.stride == (1, 1) and self.padding == (0, 0):
            y = self._multiplied(x, last)
        elif self.has_grouped_factors:
            second = self.linear.blkdiag2
            blocks, _, depth = second.shape
            kernel = self.linear.blkdiag1.reshape(-1, self.in_channels // self.groups, *size)
            y = _turned(self._conv_forward(x, _laid(kernel, last), None), depth, last)
            kernel, where = _laid(second.reshape(-1, depth, 1, 1), last), self.channel_pos
            y = flow._C.conv2d(y, kernel, None, groups=blocks, channel_pos=where)
            y = _turned(y, blocks, last).narrow(3 if last else 1, 0, self.out_channels)
        else:
            one_hot = identity(math.prod(size), x).reshape(-1, 1, *size)
            one_hot = _laid(one_hot.repeat(self.in_channels, 1, 1, 1), last)
            y = self._multiplied(self._conv_forward(x, one_hot, None), last)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype).reshape(-1, *(() if last else (1, 1)))

    def _multiplied(self, patches: flow.Tensor, last: bool) -> flow.Tensor:
        if last:
            return self.linear(patches)
        return as_channels_first(self.linear(as_channels_last(patches)))

    def macs_per_position(self) -> int:
        """Multiply-accumulates for one position of the output: the weights, without the bias."""
        return sum(weight.numel() for weight in self.linear.parameters())


def replace_convolutions(
    model: nn.Module, config: LinearLike = "monarch", include: str = "", exclude: str | None = None
) -> list[str]:
    """Replace nn.Conv2d of one group by fresh MonarchConv2d as `replace_linears` does, after
    `to_channels_last`."""
    build = partial(like, MonarchConv2d, config=LinearConfig.of(config))
    return replace_layers(model, nn.Conv2d, build, include, exclude)


def like(cls: type, old: nn.Conv2d, **options: Any) -> nn.Conv2d:
    """A convolution of this class with the sizes and layout of another, and fresh weights."""
    sizes = (old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding)
    new = cls(*sizes, old.dilation, bias=old.bias is not None, **options)
    new.channel_pos, weight = old.channel_pos, next(old.parameters())
    return new.to(weight.device, weight.dtype).train(old.training)


def _laid(kernel: flow.Tensor, last: bool) -> flow.Tensor:
    return as_channels_last(kernel) if last else kernel


def _turned(x: flow.Tensor, rows: int, last: bool) -> flow.Tensor:
    """The channels as a grid of so many rows, transposed."""
    axis, shape = 3 if last else 1, tuple(x.shape)
    grid = x.reshape(*shape[:axis], rows, -1, *shape[axis + 1 :])
    return grid.transpose(axis, axis + 1).reshape(shape)
