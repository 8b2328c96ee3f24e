"""prepare() hides nothing: what is NaN or infinite in a model makes its copy's outputs so too."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel import layouts
from oneflow_accel.inference import prepare

import numpy as np
import oneflow as flow
import pytest
from flowvision.models.resnet import BasicBlock, ResNet
from oneflow import nn

from tests.oneflow_accel.inference.test_bfloat16 import needs_bfloat16
from tests.oneflow_accel.kernels.harness import needs_plugin, random

Randomize = Callable[[nn.Module], nn.Module]


def _chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 5, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=7),
    "chain": _chain,
}
# One of each kind of place that a fold takes its numbers from.
TENSORS = {
    "resnet": (
        "conv1.weight",
        "bn1.running_var",
        "layer2.0.conv2.weight",
        "layer2.0.downsample.1.bias",
        "fc.bias",
    ),
    "chain": ("0.weight", "0.bias", "1.running_mean", "3.weight", "4.weight", "6.weight"),
}


@needs_plugin
@pytest.mark.parametrize(
    "dtype", [flow.float32, pytest.param(flow.bfloat16, marks=needs_bfloat16)], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_nan_in_any_tensor_of_a_model(name: str, dtype: flow.dtype, randomize: Randomize) -> None:
    """In a parameter, a statistic or a pixel: the copy is NaN only where the model is."""
    model = layouts.to_channels_last(randomize(MODELS[name]()))
    x = np.ascontiguousarray(random(2, 3, 33, 31).transpose(0, 2, 3, 1))
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for tensor_name in TENSORS[name]:
        tensor = tensors[tensor_name]
        kept = tensor.numpy().copy()
        spoilt = kept.copy()
        spoilt[1] = np.nan
        tensor.data.copy_(flow.tensor(spoilt))
        _assert_as_the_model(model, x, dtype, tensor_name)
        tensor.data.copy_(flow.tensor(kept))
    for value in (np.nan, np.inf):
        pixel = x.copy()
        pixel[1, 2, 2, 2] = value
        _assert_as_the_model(model, pixel, dtype, f"{value} in a pixel")


def _assert_as_the_model(model: nn.Module, x: np.ndarray, dtype: flow.dtype, what: str) -> None:
    with flow.no_grad():
        expected = model(flow.tensor(x)).numpy()
        actual = prepare(model, dtype)(flow.tensor(x)).numpy()
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected), what)
