"""Forward functions of modules whose convolutions do what follows them as well; `rules.py` says
which. `self` is a module, or nn.Graph's proxy of one: no `super()` here."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels.linear import linear

import oneflow as flow


def _shortcut(self: Any, x: flow.Tensor) -> flow.Tensor:
    return x if self.downsample is None else self.downsample(x)


def basic_block(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.conv2(self.conv1(x), _shortcut(self, x))


def bottleneck(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.conv3(self.conv2(self.conv1(x)), _shortcut(self, x))


def only_conv(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.conv(x)


def linear_with_bias(self: Any, x: flow.Tensor) -> flow.Tensor:
    """nn.Linear."""
    return linear(x, self.weight, self.bias)
