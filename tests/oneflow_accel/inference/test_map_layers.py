"""prepare() on layers of (N, H, W, C) whose weights have the order of checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.backends import resolve
from oneflow_accel.inference import map_layer, prepare
from oneflow_accel.inference.folding import InferenceConv2d
from oneflow_accel.kernels.convolution import channels_last_conv2d

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import random
from tests.oneflow_accel.kernels.reference_conv import ConvCase, conv_forward
from tests.tolerances import assert_close

_support = resolve("cpu").backend.supports("bfloat16_inference")
needs_bfloat16 = pytest.mark.skipif(not _support, reason=_support.reason)


class PlainMapConv(nn.Conv2d):
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
class MapConv(PlainMapConv):
    pass


@map_layer
class MapNorm(nn.BatchNorm2d):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.channel_axis = 3


def chain() -> nn.Sequential:
    """Every way in which maps are folded: strides, dilation, few channels a group, no bias."""
    return nn.Sequential(
        MapConv(3, 32, 5, stride=2, padding=4, dilation=2),
        nn.SiLU(),
        MapConv(32, 64, 3, padding=1, groups=8, bias=False),
        MapNorm(64),
        nn.ReLU(),
        MapConv(64, 32, 3, padding=1, groups=8),
        MapNorm(32),
        nn.SiLU(),
        MapConv(32, 16, 3, padding=1),
    )


def test_the_same_maps(randomize: Callable[[nn.Module], nn.Module]) -> None:
    model = randomize(chain())
    x = flow.tensor(random(2, 15, 12, 3))
    with flow.no_grad():
        expected = model(x).numpy()
        prepared = prepare(model)
        assert_close(prepared(x).numpy(), expected, reduced=8 * 9)
    kinds = [type(module) for module in prepared]
    fused, gone = InferenceConv2d, nn.Identity
    assert kinds == [fused, gone, fused, gone, gone, fused, gone, gone, fused]
    assert [prepared[i].activation for i in (0, 2, 5, 8)] == ["silu", "relu", "silu", ""]
    # A copy's weights are its own, in an order of its own; the model's stay.
    assert prepared[2].weight.shape == (64, 3, 3, 4)
    assert model[2].weight.shape == (64, 4, 3, 3)
    # The fused operator has no gradient: its reference takes its place.
    grads = []
    for one in (model, prepared):
        one(x.requires_grad_()).sum().backward()
        grads.append(x.grad.numpy())
        x.grad = None
    assert_close(grads[1], grads[0], reduced=1000)


def test_only_classes_that_say_so() -> None:
    prepared = prepare(nn.Sequential(PlainMapConv(3, 8, 3), MapNorm(8)))
    assert [type(module) for module in prepared] == [PlainMapConv, MapNorm]


@needs_bfloat16
@pytest.mark.parametrize("groups", [1, 8])
def test_bfloat16_beside_float64(groups: int) -> None:
    case = ConvCase(2, (32, 64), (9, 7), (3, 3), (1, 1), (1, 1), (1, 1), groups)
    conv = MapConv(32, 64, 3, padding=1, groups=groups)
    x = random(2, 9, 7, 32)
    with flow.no_grad():
        prepared = prepare(nn.Sequential(conv, nn.SiLU()), flow.bfloat16)
        assert prepared[0].weight.dtype == flow.bfloat16
        found = prepared(flow.tensor(x)).numpy()
    tensors = [conv.weight.numpy(), conv.bias.numpy()]
    y = np.moveaxis(conv_forward(case, np.moveaxis(x, -1, 1), *tensors), 1, -1)
    expected = y / (1 + np.exp(-y))
    assert_close(found, expected, dtype="bfloat16")
    assert np.abs(found - expected).max() > 1e-4, "it was computed in float32"
