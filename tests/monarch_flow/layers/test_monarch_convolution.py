"""MonarchConv2d against dense convolutions by numpy in float64, with the multiplied-out kernel."""

from __future__ import annotations

from typing import Any

from oneflow_accel import layouts
from oneflow_accel.backends import resolve
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.metrics.macs import count_macs
from monarch_flow.layers import MonarchConv2d
from monarch_flow.projection import densify_model, project_model
from tests.monarch_flow import monarch_reference as reference
from tests.tolerances import assert_close

NHWC = resolve("cpu").backend.supports("nhwc")
LAST = pytest.param(True, marks=pytest.mark.skipif(not NHWC, reason=NHWC.reason or "is there"))
# Channels in and out, and nn.Conv2d's kernel size, stride, padding and dilation. 4 blocks divide
# neither the 3 channels nor the 10.
SHAPES = [(8, 12, 1), (8, 12, 1, 2), (8, 10, 3, 2, 1), (8, 12, 3, 1, 2, 2), (10, 8, 3, 1, 1)]
SHAPES += [(3, 16, 7, 2, 3), (8, 12, (3, 1), (1, 2), (1, 0)), (8, 8, 1, 1, 1)]


def patches(x: np.ndarray, conv: nn.Conv2d) -> np.ndarray:
    """(N, C, H, W) to (N, H', W', C, kh, kw)."""
    (top, left), (down, right), (dy, dx) = conv.padding, conv.stride, conv.dilation
    x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    size = (conv.kernel_size[0] - 1) * dy + 1, (conv.kernel_size[1] - 1) * dx + 1
    view = np.lib.stride_tricks.sliding_window_view(x, size, axis=(2, 3))
    return view[:, :, ::down, ::right, ::dy, ::dx].transpose(0, 2, 3, 1, 4, 5)


def numbers(tensor: flow.Tensor, last: bool = False) -> np.ndarray:
    array = tensor.detach().to(flow.float64).numpy()
    return array.transpose(0, 3, 1, 2) if last else array


@pytest.mark.parametrize("last", [False, LAST])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dense_convolution_and_its_gradients(shape: Any, dtype: str, last: bool) -> None:
    if last and dtype == "float64":
        pytest.skip("OneFlow's own NHWC convolution of float64 is wrong, and the plug-in has none")
    flow.manual_seed(0)
    conv, kind = MonarchConv2d(*shape).to(getattr(flow, dtype)), getattr(flow, dtype)
    conv.channel_pos = "channels_last" if last else "channels_first"
    rng = np.random.default_rng(0)
    given = flow.tensor(rng.standard_normal((2, 9, 10, shape[0]))).to(kind)
    given = (given if last else given.permute(0, 3, 1, 2)).contiguous().requires_grad_()
    y = conv(given)
    grad = flow.tensor(rng.standard_normal(y.shape)).to(kind)
    y.backward(grad)
    x, y_grad = numbers(given, last), numbers(grad, last)
    rows = patches(x, conv)
    first, second = numbers(conv.linear.blkdiag1), numbers(conv.linear.blkdiag2)
    features, count = rows[0, 0, 0].size, len(first)
    kernel = reference.dense_by_slots(first, second)[: shape[1], :features]
    kernel = kernel.reshape(shape[1], *rows.shape[3:])
    expected = np.einsum("nhwcij,ocij->nohw", rows, kernel) + numbers(conv.bias)[:, None, None]
    assert_close(numbers(y, last), expected, dtype=dtype, reduced=features)

    places = patches(1 + np.arange(x.size).reshape(x.shape), conv)
    back = np.einsum("nohw,ocij->nhwcij", y_grad, kernel).ravel()
    back = np.bincount(places.ravel(), back, x.size + 1)[1:].reshape(x.shape)
    assert_close(numbers(given.grad, last), back, dtype=dtype, reduced=kernel.size)
    flat = rows.reshape(-1, features)
    flat = np.pad(flat, ((0, 0), (0, count * first.shape[2] - features)))
    up = y_grad.transpose(0, 2, 3, 1).reshape(len(flat), -1)
    up = np.pad(up, ((0, 0), (0, count * second.shape[1] - shape[1])))
    _, *wanted = reference.monarch_gradients(flat, first, second, up)
    parameters = (conv.linear.blkdiag1, conv.linear.blkdiag2, conv.bias)
    for parameter, gradient in zip(parameters, (*wanted, up.sum(0)[: shape[1]]), strict=True):
        assert_close(numbers(parameter.grad), gradient, dtype=dtype, reduced=len(flat))


@pytest.mark.parametrize("last", [False, LAST])
@pytest.mark.parametrize("config", ["monarch", "blockdiag", {"_target_": "low_rank", "rank": 3}])
def test_projection_and_back(config: Any, last: bool) -> None:
    """A kernel of the structure is found again; any other comes as near as the best there is."""
    flow.manual_seed(1)
    convs = [nn.Conv2d(*shape, bias=bool(i % 2)) for i, shape in enumerate(SHAPES)]
    kernels = [conv.weight.numpy().reshape(len(conv.weight), -1).copy() for conv in convs]
    convs[0].weight.requires_grad_(False)
    model = nn.Sequential(*convs, nn.Conv2d(8, 8, 3, groups=2)).eval()
    if last:
        layouts.to_channels_last(model, resolve("cpu").backend)
    for report in project_model(model, config, exclude="^1$", kind=nn.Conv2d):
        if config == "monarch":
            linear, kernel = model[int(report.name)].linear, kernels[int(report.name)]
            best = reference.best_squared_error(
                kernel, linear.blkdiag1.shape, linear.blkdiag2.shape
            )
            assert report.error == pytest.approx(best**0.5, rel=1e-5)
    assert [isinstance(conv, MonarchConv2d) for conv in model] == [True, False, *[True] * 6, False]
    x = flow.tensor(np.random.default_rng(2).standard_normal((2, 8, 9, 10)), dtype=flow.float32)
    x = x.permute(0, 2, 3, 1).contiguous() if last else x
    wanted = model[2](x).numpy()
    densify_model(model)
    assert {(type(module), module.training) for module in model} == {(nn.Conv2d, False)}
    assert not model[0].weight.requires_grad
    assert_close(model[2](x).numpy(), wanted, reduced=72)
    again = project_model(model, config, exclude="^(1|8)$", kind=nn.Conv2d)
    assert max(report.relative_error for report in again) < 1e-6


def test_cost_and_refusals() -> None:
    model = nn.Sequential(MonarchConv2d(8, 12, 3, 2, 1, config="blockdiag"), nn.Conv2d(12, 4, 1))
    assert count_macs(model, 9, in_chans=8) == 25 * (72 * 12 // 4 + 48)
    with pytest.raises(UserError, match="one group"):
        MonarchConv2d(8, 8, 3, groups=2)
    with pytest.raises(ValueError, match="channels"):
        MonarchConv2d(8, 8, 3)(flow.zeros(1, 4, 9, 9))
