"""prepare(dtype=bfloat16): float32 outside, bfloat16 inside where there are kernels for it."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel import layouts
from oneflow_accel.backends import resolve
from oneflow_accel.inference import prepare
from oneflow_accel.inference.folding import InferenceConv2d

import flowvision
import numpy as np
import oneflow as flow
import pytest
from flowvision.models.vision_transformer import VisionTransformer
from oneflow import nn

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import Forward, needs_plugin, random
from tests.tolerances import TOLERANCES, Tolerance, assert_close

_support = resolve("cpu").backend.supports("bfloat16_inference")
needs_bfloat16 = pytest.mark.skipif(not _support, reason=_support.reason)

Randomize = Callable[[nn.Module], nn.Module]


def resnet() -> nn.Module:
    return flowvision.models.resnet18(num_classes=10)


def vit() -> nn.Module:
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4, num_classes=10
    )


def assert_close_in_bfloat16(model: nn.Module, x: flow.Tensor, roundings: int) -> None:
    """`roundings`: results on the way from input to output that are rounded to bfloat16."""
    with flow.no_grad():
        expected = model(x).numpy()
        prepared = prepare(model, flow.bfloat16)
        actual = prepared(x)
        assert actual.dtype == flow.float32
        np.testing.assert_array_equal(Forward(prepared)(x).numpy(), actual.numpy())
    # Errors of rounding are independent of each other and add up like a random walk.
    table = TOLERANCES["bfloat16"]
    factor = np.sqrt(roundings)
    assert_close(
        actual.numpy(),
        expected,
        dtype="bfloat16",
        override=Tolerance(table.rtol * factor, table.atol * factor),
        reason=f"{roundings} roundings one after the other, each of the table's size",
    )
    difference = np.abs(actual.numpy() - expected).max()
    assert difference > 1e-6 * np.abs(expected).max(), "it was computed in float32"


@needs_bfloat16
def test_resnet(randomize: Randomize) -> None:
    model = layouts.to_channels_last(randomize(resnet()))
    x = np.ascontiguousarray(random(4, 3, 64, 64).transpose(0, 2, 3, 1))
    # 18 layers with weights; each rounds its result, and its weights are rounded.
    assert_close_in_bfloat16(model, flow.tensor(x), roundings=2 * 18)


@needs_bfloat16
def test_vit() -> None:
    # In each block: two norms, four linear layers, two products of attention, softmax, gelu and
    # two sums.
    assert_close_in_bfloat16(vit().eval(), flow.tensor(random(4, 3, 32, 32)), roundings=3 * 12)


@needs_bfloat16
def test_what_has_no_kernel_computes_in_float32(randomize: Randomize) -> None:
    seen: list[flow.dtype] = []

    class Recorder(nn.Module):
        def forward(self, x: flow.Tensor) -> flow.Tensor:
            seen.append(x.dtype)
            return x * 2

    model = randomize(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            Recorder(),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 3),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        )
    )
    x = flow.tensor(random(2, 3, 9, 9))
    with flow.no_grad():
        prepared = prepare(model, flow.bfloat16)
        actual = prepared(x).numpy()
        assert seen == [flow.float32]
        assert_close(actual, model(x).numpy(), dtype="bfloat16", reduced=72)
    dtypes = {name: tensor.dtype for name, tensor in prepared.state_dict().items()}
    assert dtypes["0.weight"] == dtypes["6.weight"] == flow.bfloat16
    assert dtypes["0.bias"] == dtypes["2.running_mean"] == flow.float32


_NO_BFLOAT16 = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import oneflow_accel
from oneflow_accel.inference import prepare
import numpy as np, oneflow as flow
from oneflow import nn
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
x = flow.randn(2, 3, 9, 9)
prepared = prepare(model, flow.bfloat16)
with flow.no_grad():
    np.testing.assert_allclose(prepared(x).numpy(), model(x).numpy(), rtol=1e-4, atol=1e-5)
print(prepared[0].weight.dtype)
"""


@needs_plugin
def test_a_cpu_without_bfloat16_computes_in_float32() -> None:
    env = {"ONEFLOW_ACCEL_ISA": "avx2"}
    result = run_process(["-c", _NO_BFLOAT16], timeout=60, env=env)
    assert "oneflow.float32" in result.stdout, result.stdout
    lines = [line for line in result.stdout.splitlines() if "runs in float32" in line]
    assert len(lines) == 1
    assert "ONEDNN_MAX_CPU_ISA" in lines[0]


@needs_bfloat16
def test_a_model_that_nothing_is_known_of_stays_in_float32(caplog) -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return self.conv(x)

    with caplog.at_level("WARNING", logger="oneflow_accel"):
        prepared = prepare(Unknown(), flow.bfloat16)
    assert isinstance(prepared.conv, InferenceConv2d)
    assert prepared.conv.weight.dtype == flow.float32
    assert "Unknown" in caplog.text
