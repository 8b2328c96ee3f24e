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

from flow_train.metrics.macs import macs_of_call
from monarch_flow.layers import BlockdiagLinear, MonarchConv2d, replace_linears
from monarch_flow.projection import densify_model, project_model
from tests.monarch_flow.monarch_reference import (
    best_squared_error,
    dense_by_slots,
    monarch_gradients,
)
from tests.tolerances import assert_close

NHWC = resolve("cpu").backend.supports("nhwc")
needs_nhwc = pytest.mark.skipif(not NHWC, reason=NHWC.reason or "is there")
# Channels in and out, and nn.Conv2d's kernel size, stride, padding and dilation. 4 blocks divide
# neither the 3 channels nor the 10.
SHAPES = [(8, 12, 1), (8, 12, 1, 2), (8, 10, 3, 2, 1), (8, 12, 3, 1, 2, 2), (10, 8, 3, 1, 1)]
SHAPES += [(3, 16, 7, 2, 3), (8, 12, (3, 1), (1, 2), (1, 0)), (8, 8, 1, 1, 1)]
# OneFlow's own NHWC convolution of float64 is wrong, and the plug-in has none.
KINDS = [("float64", False), ("float32", False), ("bfloat16", False)]
KINDS += [pytest.param(dtype, True, marks=needs_nhwc) for dtype in ("float32", "bfloat16")]


def patches(x: np.ndarray, conv: nn.Conv2d) -> np.ndarray:
    """(N, C, H, W) to (N, H', W', C, kh, kw)."""
    (top, left), (down, right), (dy, dx) = conv.padding, conv.stride, conv.dilation
    x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    windows = ((size - 1) * step + 1 for size, step in zip(conv.kernel_size, (dy, dx), strict=True))
    view = np.lib.stride_tricks.sliding_window_view(x, tuple(windows), axis=(2, 3))
    return view[:, :, ::down, ::right, ::dy, ::dx].transpose(0, 2, 3, 1, 4, 5)


def numbers(tensor: flow.Tensor, *, last: bool = False) -> np.ndarray:
    array = tensor.detach().to(flow.float64).numpy()
    return array.transpose(0, 3, 1, 2) if last else array


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "last"), KINDS)
def test_a_dense_convolution_and_its_gradients(shape: Any, dtype: str, last: bool) -> None:
    flow.manual_seed(0)
    conv = MonarchConv2d(*shape).to(getattr(flow, dtype))
    conv.channel_pos = "channels_last" if last else "channels_first"
    rng = np.random.default_rng(0)
    given = flow.tensor(rng.standard_normal((2, 9, 10, shape[0]))).to(getattr(flow, dtype))
    given = (given if last else given.permute(0, 3, 1, 2)).contiguous().requires_grad_()
    y = conv(given)
    x, rows = numbers(given, last=last), patches(numbers(given, last=last), conv)
    factors = numbers(conv.linear.blkdiag1), numbers(conv.linear.blkdiag2)
    kernel = dense_by_slots(*factors)[: shape[1], : rows[0, 0, 0].size]
    kernel = kernel.reshape(shape[1], *rows.shape[3:])
    expected = np.einsum("nhwcij,ocij->nohw", rows, kernel)
    expected += numbers(conv.bias)[:, None, None]
    near: Any = {"dtype": dtype, "reduced": rows[0, 0, 0].size}
    assert_close(numbers(y, last=last), expected, **near)

    grad = flow.tensor(rng.standard_normal(y.shape)).to(y.dtype)
    y.backward(grad)
    y_grad = numbers(grad, last=last)
    places = patches(1 + np.arange(x.size).reshape(x.shape), conv)
    back = np.einsum("nohw,ocij->nhwcij", y_grad, kernel).ravel()
    back = np.bincount(places.ravel(), back, x.size + 1)[1:].reshape(x.shape)
    assert_close(numbers(given.grad, last=last), back, **near)
    flat = rows.reshape(-1, rows[0, 0, 0].size)
    flat = np.pad(flat, ((0, 0), (0, len(factors[0]) * factors[0].shape[2] - flat.shape[1])))
    up = y_grad.transpose(0, 2, 3, 1).reshape(len(flat), -1)
    up = np.pad(up, ((0, 0), (0, len(factors[1]) * factors[1].shape[1] - shape[1])))
    _, first, second = monarch_gradients(flat, *factors, up)
    near["reduced"] = len(flat)
    assert_close(numbers(conv.linear.blkdiag1.grad), first, **near)
    assert_close(numbers(conv.linear.blkdiag2.grad), second, **near)
    assert_close(numbers(conv.bias.grad), y_grad.sum(axis=(0, 2, 3)), **near)


@pytest.mark.parametrize("last", [False, pytest.param(True, marks=needs_nhwc)])
@pytest.mark.parametrize("config", ["monarch", "blockdiag", {"_target_": "low_rank", "rank": 3}])
def test_projection_and_back(config: Any, last: bool) -> None:
    """A kernel of the structure is found again; any other comes as near as the best there is."""
    flow.manual_seed(1)
    convs = [nn.Conv2d(*shape, bias=bool(i % 2)) for i, shape in enumerate(SHAPES)]
    model = nn.Sequential(*convs, nn.Conv2d(8, 8, 3, groups=2)).eval()
    kernels = [
        conv.weight.numpy().astype(np.float64).reshape(len(conv.weight), -1) for conv in convs
    ]
    if last:
        layouts.to_channels_last(model, resolve("cpu").backend)
    convs[0].weight.requires_grad_(False)
    reports = project_model(model, config, exclude="^1$", kind=nn.Conv2d)
    assert [report.name for report in reports] == ["0", *map(str, range(2, len(SHAPES)))]
    assert {type(model[1]), type(model[-1])} == {nn.Conv2d}
    x = flow.tensor(np.random.default_rng(2).standard_normal((2, 8, 9, 10)).astype(np.float32))
    x = x.permute(0, 2, 3, 1).contiguous() if last else x
    for report in reports:
        if config == "monarch":
            linear = model[int(report.name)].linear
            shapes = tuple(linear.blkdiag1.shape), tuple(linear.blkdiag2.shape)
            best = best_squared_error(kernels[int(report.name)], *shapes) ** 0.5
            assert report.error == pytest.approx(best, rel=1e-5)
    wanted = model[2](x).numpy()
    densify_model(model)
    assert {(type(module), module.training) for module in model} == {(nn.Conv2d, False)}
    assert not model[0].weight.requires_grad
    again = project_model(model, config, exclude="^(1|8)$", kind=nn.Conv2d)
    assert max(report.relative_error for report in again) < 1e-6
    assert_close(model[2](x).numpy(), wanted, reduced=72)


def test_cost_and_refusals() -> None:
    model = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.Conv2d(12, 4, 1))
    assert replace_linears(model, "blockdiag", "0", kind=nn.Conv2d) == ["0"]
    assert isinstance(model[0].linear, BlockdiagLinear)
    x = flow.randn(2, 8, 9, 9)
    assert [row.macs for row in macs_of_call(model, x)] == [2 * 25 * 72 * 12 // 4, 2 * 25 * 48]
    with pytest.raises(UserError, match="one group"):
        MonarchConv2d(8, 8, 3, groups=2)
    with pytest.raises(ValueError, match="channels"):
        MonarchConv2d(8, 8, 3)(flow.zeros(1, 4, 9, 9))
    with pytest.raises(UserError, match=r"no nn\.Conv2d has a name"):
        project_model(model, "monarch", include="head", kind=nn.Conv2d)
