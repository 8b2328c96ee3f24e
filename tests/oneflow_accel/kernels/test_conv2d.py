"""conv1d, conv2d and conv3d and their gradients: both data formats, against float64."""

from __future__ import annotations

import itertools

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import (
    as_held,
    assert_eager_equals_graph,
    assert_same_after_fork,
    assert_same_in_threads,
    gradients,
    needs_plugin,
    random,
)
from tests.oneflow_accel.kernels.reference_conv import ConvCase, conv_forward, conv_gradients
from tests.tolerances import assert_close

pytestmark = needs_plugin

FORMATS = ["channels_first", "channels_last"]
RESULTS = ("y", "dx", "dw", "db")


def case(
    channels: tuple[int, int],
    spatial: tuple[int, int],
    kernel: tuple[int, int],
    *,
    batch: int = 2,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> ConvCase:
    return ConvCase(batch, channels, spatial, kernel, stride, padding, dilation, groups)


THREE_BY_THREE = case((6, 10), (9, 11), (3, 3), padding=(1, 1))
CASES = {
    "one-pixel": case((1, 1), (1, 1), (1, 1), batch=1),
    "odd": case((7, 5), (13, 9), (2, 3), batch=3, stride=(2, 1), padding=(1, 0)),
    "1x1": case((64, 40), (8, 7), (1, 1)),
    "1x1-large-image": case((24, 17), (30, 31), (1, 1)),
    "1x1-strided": case((48, 64), (15, 14), (1, 1), stride=(2, 2)),
    "1x1-padded": case((5, 6), (6, 5), (1, 1), padding=(2, 1)),
    "3x3": THREE_BY_THREE,
    "3x3-wide": case((64, 72), (10, 9), (3, 3), padding=(1, 1)),
    "3x3-strided": case((32, 48), (14, 13), (3, 3), stride=(2, 2), padding=(1, 1)),
    "stem": case((3, 64), (32, 30), (7, 7), stride=(2, 2), padding=(3, 3)),
    "patches": case((3, 50), (24, 16), (8, 8), stride=(8, 8)),
    "row-kernel": case((8, 9), (5, 17), (1, 7), padding=(0, 3)),
    "unread-border": case((8, 8), (12, 12), (3, 3), stride=(4, 3)),
    "dilated": case((8, 12), (15, 14), (3, 3), padding=(2, 3), dilation=(2, 3)),
    "groups": case((32, 48), (9, 10), (3, 3), padding=(1, 1), groups=4),
    "odd-groups": case((15, 9), (8, 7), (3, 2), stride=(2, 2), padding=(1, 1), groups=3),
    "few-channels": case((48, 64), (14, 13), (3, 3), padding=(1, 1), groups=16),
    "few-channels-dilated": case(
        (20, 30), (9, 17), (2, 3), padding=(1, 2), dilation=(2, 2), groups=5
    ),
    "depthwise": case((40, 40), (11, 12), (3, 3), padding=(1, 1), groups=40),
    "depthwise-strided": case((16, 16), (15, 9), (5, 5), stride=(2, 2), padding=(2, 2), groups=16),
    "depthwise-twice": case((12, 24), (7, 8), (3, 3), padding=(1, 1), groups=12),
    "empty-batch": case((6, 10), (9, 11), (3, 3), batch=0, padding=(1, 1)),
    "conv1d": ConvCase(2, (6, 8), (23,), (5,), (2,), (2,), (1,), 2),
    "conv3d": ConvCase(2, (4, 6), (5, 6, 7), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1),
}


def to_format(array: np.ndarray, data_format: str) -> np.ndarray:
    """(N, C, spatial...) or (O, I, kernel...) in the order of `data_format`."""
    if data_format == "channels_first":
        return array
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def from_format(array: np.ndarray, data_format: str) -> np.ndarray:
    return array if data_format == "channels_first" else np.moveaxis(array, -1, 1)


def convolve(
    conv: ConvCase, data_format: str, *tensors: flow.Tensor, op: str | None = None
) -> flow.Tensor:
    """Run oneflow's operator on (x, weight) or (x, weight, bias)."""
    operator = getattr(flow._C, op or f"conv{len(conv.spatial)}d")
    x, weight, *bias = tensors
    return operator(
        x,
        weight,
        bias[0] if bias else None,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        channel_pos=data_format,
    )


def data(conv: ConvCase, dtype: str = "float32") -> list[np.ndarray]:
    """x, weight, bias and dy, channels first."""
    shapes = (conv.x_shape, conv.weight_shape, (conv.channels[1],), conv.y_shape)
    return [as_held(random(*shape, seed=i), dtype) for i, shape in enumerate(shapes)]


def expected(conv: ConvCase, dtype: str = "float32") -> dict[str, np.ndarray]:
    x, weight, bias, dy = data(conv, dtype)
    values = (conv_forward(conv, x, weight, bias), *conv_gradients(conv, x, weight, dy))
    return dict(zip(RESULTS, values, strict=True))


def computed(conv: ConvCase, data_format: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    x, weight, bias, dy = data(conv, dtype)
    arrays = [to_format(x, data_format), to_format(weight, data_format), bias]
    y, (dx, dw, db) = gradients(
        lambda *tensors: convolve(conv, data_format, *tensors),
        arrays,
        to_format(dy, data_format),
        [dtype] * 3,
    )
    converted = [from_format(array, data_format) for array in (y, dx, dw)]
    return dict(zip(RESULTS, (*converted, db), strict=True))


def assert_all_close(conv: ConvCase, actual: dict[str, np.ndarray], dtype: str = "float32") -> None:
    reference = expected(conv, dtype)
    for name in RESULTS:
        assert_close(actual[name], reference[name], dtype=dtype, reduced=conv.terms[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, data_format: str, dtype: str) -> None:
    assert_all_close(CASES[name], computed(CASES[name], data_format, dtype), dtype)


# Convolutions of bfloat16 where oneDNN has none: on float32 copies.
WITHOUT_PRODUCTS = """
import oneflow_accel  # before oneflow
from oneflow_accel.kernels import plugin
from tests.oneflow_accel.kernels import test_conv2d as t
assert not plugin.state().fast_bfloat16
for data_format in t.FORMATS:
    for name in ("odd", "3x3", "stem", "few-channels", "depthwise", "conv1d", "empty-batch"):
        actual = t.computed(t.CASES[name], data_format, "bfloat16")
        t.assert_all_close(t.CASES[name], actual, "bfloat16")
print("all close")
"""


def test_bfloat16_on_a_processor_without_it() -> None:
    result = run_process(["-c", WITHOUT_PRODUCTS], env={"ONEFLOW_ACCEL_ISA": "avx2"})
    assert "all close" in result.stdout, result.stdout


def test_gradients_of_an_empty_batch_are_zero() -> None:
    results = computed(CASES["empty-batch"], "channels_last")
    assert results["y"].size == results["dx"].size == 0
    assert not results["dw"].any()
    assert not results["db"].any()


@pytest.mark.parametrize("data_format", FORMATS)
def test_views_as_inputs(data_format: str) -> None:
    """Every other image and channel of a larger tensor; weights and dy transposed."""
    conv = THREE_BY_THREE
    x, weight, bias, dy = (to_format(a, data_format) if a.ndim > 1 else a for a in data(conv))
    larger = np.zeros([2 * n for n in x.shape], np.float32)
    larger[tuple(slice(None, None, 2) for _ in x.shape)] = x
    reverse = tuple(reversed(range(4)))

    def run(larger: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor) -> flow.Tensor:
        view = larger[::2, ::2, ::2, ::2]
        return convolve(conv, data_format, view, weight.permute(*reverse), bias).permute(*reverse)

    arrays = [larger, np.ascontiguousarray(weight.transpose(reverse)), bias]
    y, (dx, dw, db) = gradients(run, arrays, np.ascontiguousarray(dy.transpose(reverse)))
    results = [y.transpose(reverse), dx[::2, ::2, ::2, ::2], dw.transpose(reverse)]
    converted = [from_format(array, data_format) for array in results]
    assert_all_close(conv, dict(zip(RESULTS, (*converted, db), strict=True)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_module_with_bias(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.Conv2d, whose bias is an operator of its own in oneflow."""
    monkeypatch.setenv("ONEFLOW_ENABLE_NHWC", "1" if channels_last else "0")
    data_format = FORMATS[channels_last]
    conv = CASES["groups"]
    x, weight, bias, dy = (to_format(a, data_format) if a.ndim > 1 else a for a in data(conv))
    module = nn.Conv2d(*conv.channels, conv.kernel, padding=conv.padding, groups=conv.groups)
    module.load_state_dict({"weight": flow.tensor(weight), "bias": flow.tensor(bias)})
    tensor = flow.tensor(x, requires_grad=True)
    y = module(tensor)
    y.backward(flow.tensor(dy))
    results = [a.numpy() for a in (y, tensor.grad, module.weight.grad)]
    converted = [from_format(array, data_format) for array in results]
    actual = dict(zip(RESULTS, (*converted, module.bias.grad.numpy()), strict=True))
    assert_all_close(conv, actual)


@pytest.mark.parametrize("data_format", FORMATS)
def test_bias_as_an_input_of_the_operator(data_format: str) -> None:
    """oneflow gives conv2d its bias only if a variable says so before the first convolution."""
    code = f"""
import oneflow_accel  # before oneflow
from tests.oneflow_accel.kernels import test_conv2d as t
for name in ("odd", "1x1-large-image", "stem", "groups", "depthwise"):
    t.assert_all_close(t.CASES[name], t.computed(t.CASES[name], {data_format!r}))
print("all close")
"""
    result = run_process(["-c", code], env={"ONEFLOW_KERNEL_ENABLE_FUSED_CONV_BIAS": "1"})
    assert "all close" in result.stdout, result.stdout


@pytest.mark.parametrize("data_format", FORMATS)
def test_second_order_gradient(data_format: str) -> None:
    """d(sum(dx * v))/dw, which runs the operators in other roles: dx is linear in w."""
    conv = CASES["3x3-strided"]
    x, weight, _, dy = (to_format(a, data_format) if a.ndim > 1 else a for a in data(conv))
    v = random(*conv.x_shape, seed=4)
    tensors = [flow.tensor(array, requires_grad=True) for array in (x, weight, dy)]
    y = convolve(conv, data_format, *tensors[:2])
    (dx,) = flow.autograd.grad([y], [tensors[0]], [tensors[2]], create_graph=True)
    dx.backward(flow.tensor(to_format(v, data_format)))
    # sum(dx * v) = sum(conv(v, w) * dy)
    x, weight, _, dy = data(conv)
    _, dw, _ = conv_gradients(conv, v, weight, dy)
    actual = from_format(tensors[1].grad.numpy(), data_format)
    assert_close(actual, dw, reduced=conv.terms["dw"])


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("name", ["odd", "1x1", "3x3-strided", "groups", "depthwise"])
def test_eager_equals_graph(name: str, data_format: str) -> None:
    conv = CASES[name]
    x, weight, bias, dy = (to_format(a, data_format) if a.ndim > 1 else a for a in data(conv))
    assert_eager_equals_graph(
        lambda *tensors: convolve(conv, data_format, *tensors), [x, weight, bias], dy
    )


def flat_results(conv: ConvCase, data_format: str) -> np.ndarray:
    results = computed(conv, data_format)
    return np.concatenate([results[name].ravel() for name in RESULTS])


@pytest.mark.parametrize("data_format", FORMATS)
def test_deterministic_and_same_in_threads(data_format: str) -> None:
    assert_same_in_threads(lambda: flat_results(CASES["3x3-wide"], data_format))


def test_kernels_on_several_worker_threads() -> None:
    """Kernels that run at the same time have primitives and scratch memory of their own.

    They are queued from one Python thread: oneflow 0.9.0 deadlocks if several use worker threads.
    """
    work = list(itertools.product(["3x3", "3x3-wide", "stem", "depthwise"], FORMATS))
    alone = {key: flat_results(CASES[key[0]], key[1]) for key in work}
    workers = {key: flow.asyncs.thread(flow.asyncs.Thread()) for key in work}
    queued = []
    for _ in range(8):
        for name, data_format in work:
            conv = CASES[name]
            x, weight, bias, dy = (
                flow.tensor(to_format(a, data_format) if a.ndim > 1 else a) for a in data(conv)
            )
            x.requires_grad = weight.requires_grad = True
            with workers[name, data_format]:
                y = convolve(conv, data_format, x, weight, bias)
                queued.append(((name, data_format), y, flow.autograd.grad([y], [x, weight], [dy])))
    for key, y, grads in queued:
        with workers[key]:
            arrays = [from_format(tensor.numpy(), key[1]).ravel() for tensor in (y, *grads)]
        actual = np.concatenate(arrays)
        np.testing.assert_array_equal(actual, alone[key][: actual.size])


def test_forked_process_does_not_hang() -> None:
    assert_same_after_fork(
        """
x = flow.randn(2, 20, 20, 64, requires_grad=True)
w = flow.randn(64, 3, 3, 64, requires_grad=True)
y = flow._C.conv2d(x, w, None, padding=(1, 1), channel_pos="channels_last")
y.sum().backward()
return y.numpy()
"""
    )


def test_float64_stays_on_stock_kernels() -> None:
    conv = THREE_BY_THREE
    x, weight, bias, dy = (array.astype(np.float64) for array in data(conv))
    y, grads = gradients(
        lambda *tensors: convolve(conv, "channels_first", *tensors), [x, weight, bias], dy
    )
    reference = expected(conv)
    for name, actual in zip(RESULTS, (y, *grads), strict=True):
        assert_close(actual, reference[name], dtype="float64", reduced=conv.terms[name])


def test_wrong_shapes_are_python_errors() -> None:
    """As oneflow's, though the plug-in's shape rule for filter gradients replaces one of them."""
    x, weight = flow.randn(1, 6, 5, 5), flow.randn(4, 5, 3, 3)
    with pytest.raises(RuntimeError, match="weight"):
        flow._C.conv2d(x, weight, None)
