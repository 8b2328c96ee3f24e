"""channels_last_conv2d beyond its record: errors, gradients, threads; grouped convolutions."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels import convolution
from oneflow_accel.kernels.convolution import channels_last_conv2d

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    gradients,
    needs_plugin,
    random,
)

GROUPS: dict[str, Any] = {"padding": (1, 1), "groups": 4}


def test_shapes_that_do_not_fit() -> None:
    x, weight = flow.ones(2, 5, 4, 6), flow.ones(8, 3, 3, 3)
    for wrong, text in [
        ((x[0], weight), r"are not \(N, H, W, C\)"),
        ((x, weight[0]), r"are not \(N, H, W, C\)"),
        ((x, flow.ones(7, 3, 3, 3)), r"with 2 groups are not"),
        ((flow.ones(2, 5, 4, 7), weight), r"has 7 channels, and .* takes 6"),
        ((x, weight, flow.ones(6)), r"bias \(6,\) is not \(8,\)"),
        ((flow.ones(2, 5, 2, 6), weight), r"smaller than the kernel .* over 3 pixels"),
    ]:
        with pytest.raises(ValueError, match=text):
            channels_last_conv2d(*wrong, groups=2)


@needs_plugin
def test_the_operators_check_shapes_too() -> None:
    x, weight = flow.ones(2, 5, 4, 6), flow.ones(8, 3, 3, 3)
    attributes = {
        "kernel_size": (3, 3),
        "strides": (1, 1),
        "padding_before": (0, 0),
        "dilation_rate": (1, 1),
        "groups": 2,
    }
    with pytest.raises(RuntimeError, match="groups do not fit"):
        convolution._forward(x[..., :5], weight, None, **attributes)
    with pytest.raises(RuntimeError, match="of one dtype"):
        convolution._forward(x, weight.to(flow.float64), None, **attributes)
    with pytest.raises(RuntimeError, match="a gradient of"):
        convolution._data_grad(flow.ones(2, 3, 3, 8), x, weight, **attributes)


@needs_plugin
def test_reference_and_kernel_agree() -> None:
    arrays = [random(2, 6, 5, 16), random(24, 4, 3, 3, seed=1), random(24, seed=2)]
    dy = random(2, 6, 5, 24, seed=3)
    y, grads = gradients(lambda *t: channels_last_conv2d(*t, **GROUPS), arrays, dy)
    expected, expected_grads = gradients(
        lambda *t: convolution._reference(*t, stride=(1, 1), dilation=(1, 1), **GROUPS), arrays, dy
    )
    for one, other in zip([y, *grads], [expected, *expected_grads], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@needs_plugin
def test_images_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: flow.Tensor, **attributes: Any) -> None:
        raise AssertionError("the gradient of an input that requires none is computed")

    x = flow.tensor(random(2, 6, 5, 16))
    weight = flow.tensor(random(24, 4, 3, 3, seed=1), requires_grad=True)
    monkeypatch.setattr(convolution, "_data_grad", refuse)
    channels_last_conv2d(x, weight, **GROUPS).sum().backward()
    # Each weight of the middle sees every pixel once.
    middle = x.sum(dim=(0, 1, 2)).numpy().reshape(4, 1, 4).repeat(6, axis=1).reshape(24, 4)
    np.testing.assert_allclose(weight.grad.numpy()[:, :, 1, 1], middle, rtol=1e-5, atol=1e-5)


@needs_plugin
def test_without_an_input_channel_there_is_the_bias() -> None:
    """OneFlow's own conv2d refuses it."""
    x, weight, bias = flow.zeros(2, 4, 5, 0), flow.zeros(3, 0, 1, 1), flow.tensor([1.0, -2.0, 3.0])
    y = channels_last_conv2d(x, weight, bias)
    np.testing.assert_array_equal(y.numpy(), np.zeros((2, 4, 5, 3)) + bias.numpy())
    np.testing.assert_array_equal(channels_last_conv2d(x, weight).numpy(), np.zeros((2, 4, 5, 3)))
