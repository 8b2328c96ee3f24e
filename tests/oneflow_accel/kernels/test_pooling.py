"""Max, average and adaptive average pooling: values and gradients against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    as_held,
    assert_eager_equals_graph,
    assert_same_after_fork,
    assert_same_in_threads,
    gradients,
    needs_plugin,
    random,
)
from tests.oneflow_accel.kernels.reference_pooling import (
    Pair,
    adaptive,
    average_reference,
    max_reference,
    windows_of,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


# kernel, stride, padding, dilation, ceil_mode
MAX_CASES = [
    pytest.param(((3, 3), (2, 2), (1, 1), (1, 1), False), id="resnet-stem"),
    pytest.param(((2, 2), (2, 2), (0, 0), (1, 1), False), id="halving"),
    pytest.param(((3, 2), (1, 3), (1, 0), (1, 1), False), id="rectangular"),
    pytest.param(((3, 3), (2, 2), (0, 0), (1, 1), True), id="ceil"),
    pytest.param(((3, 3), (2, 2), (1, 1), (1, 1), True), id="ceil-padded"),
    pytest.param(((2, 3), (1, 2), (1, 1), (2, 3), False), id="dilated"),
    pytest.param(((3, 3), (2, 1), (1, 1), (2, 1), True), id="dilated-ceil"),
    pytest.param(((1, 1), (1, 1), (0, 0), (1, 1), False), id="identity"),
]
SHAPES = [(2, 3, 9, 7), (1, 70, 8, 11), (3, 16, 7, 7)]  # (N, C, H, W)


def to_nhwc(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def to_nchw(array: np.ndarray) -> np.ndarray:
    return array.transpose(0, 3, 1, 2)


def run(
    fn: Callable[[flow.Tensor], flow.Tensor], x: np.ndarray, dy: np.ndarray, layout: str
) -> tuple[np.ndarray, np.ndarray]:
    """y and dx in (N, C, H, W) of an operation that runs in `layout`."""
    if layout == "channels_first":
        y, (dx,) = gradients(fn, [x], dy)
        return y, dx
    y, (dx,) = gradients(fn, [to_nhwc(x)], to_nhwc(dy))
    return to_nchw(y), to_nchw(dx)


def gradient_for(shape: tuple[int, ...]) -> np.ndarray:
    return random(*shape, seed=1)


def max_pool(layout: str, *case: object, return_indices: bool = False) -> Callable:
    kernel, stride, padding, dilation, ceil = case

    def pool(x: flow.Tensor) -> flow.Tensor | tuple[flow.Tensor, flow.Tensor]:
        outputs = flow._C.max_pool2d(
            x,
            kernel_size=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            return_indices=return_indices,
            ceil_mode=ceil,
            data_format=layout,
        )
        return outputs if return_indices else outputs[0]

    return pool


def average_pool(
    layout: str, *case: object, count_padding: bool = True, divisor: int = 0
) -> Callable[[flow.Tensor], flow.Tensor]:
    kernel, stride, padding, ceil = case
    return lambda x: flow._C.avg_pool2d(
        x,
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        ceil_mode=ceil,
        count_include_pad=count_padding,
        divisor_override=divisor,
        data_format=layout,
    )


def tf_average_pool(
    kernel: Pair, stride: Pair, padding: Pair, mode: str = "customized"
) -> Callable[[flow.Tensor], flow.Tensor]:
    return lambda x: flow._C.avg_pool2d_nhwc(
        x,
        kernel_size=kernel,
        stride=stride,
        padding=mode,
        padding_before=padding,
        padding_after=padding,
        ceil_mode=False,
        data_format="channels_last",
    )


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", MAX_CASES)
def test_max_pool(
    shape: tuple[int, ...], case: tuple[Any, ...], layout: str, indices: bool
) -> None:
    # Few different values, so that most windows have several maxima: the first one counts.
    x = np.round(random(*shape))
    y_expected, index_expected, dx_expected = max_reference(
        x, *windows_of(shape, *case), gradient_for
    )
    pool = max_pool(layout, *case, return_indices=indices)
    fn = (lambda x: pool(x)[0]) if indices else pool
    y, dx = run(fn, x, gradient_for(y_expected.shape), layout)
    np.testing.assert_array_equal(y, y_expected)
    assert_close(dx, dx_expected, reduced=math.prod(case[0]))
    if indices and layout == "channels_first":
        np.testing.assert_array_equal(pool(flow.tensor(x))[1].numpy(), index_expected)
    elif indices:  # an offset in the (H, W, C) image, as in oneflow's own kernel
        index = to_nchw(pool(flow.tensor(to_nhwc(x)))[1].numpy())
        channel = np.arange(shape[1])[None, :, None, None]
        np.testing.assert_array_equal(index, index_expected * shape[1] + channel)


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_max_pool_of_nan_and_infinity(layout: str) -> None:
    x = np.full((1, 20, 4, 4), -np.inf, np.float32)
    x[0, 3, 1, 1] = np.nan
    x[0, 4, 2, 3] = 5.0
    pool = max_pool(layout, (2, 2), (2, 2), (0, 0), (1, 1), False)
    y, dx = run(pool, x, np.ones((1, 20, 2, 2), np.float32), layout)
    expected = np.full((1, 20, 2, 2), -np.inf)
    expected[0, 3, 0, 0] = np.nan
    expected[0, 4, 1, 1] = 5.0
    np.testing.assert_array_equal(y, expected)
    assert dx[0, 3, 1, 1] == dx[0, 4, 2, 3] == 1.0
    assert dx.sum() == y.size


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("indices", [False, True])
def test_max_pool_window_that_covers_no_input(layout: str, indices: bool) -> None:
    """With padding 1 and dilation 3, both taps miss an input of two rows."""
    x = random(2, 3, 2, 2)
    pool = max_pool(layout, (2, 2), (1, 1), (1, 1), (3, 3), False, return_indices=indices)
    fn = (lambda x: pool(x)[0]) if indices else pool
    y, dx = run(fn, x, np.ones((2, 3, 1, 1), np.float32), layout)
    np.testing.assert_array_equal(y, np.full((2, 3, 1, 1), -np.inf))
    np.testing.assert_array_equal(dx, np.zeros_like(x))


AVERAGE_CASES = [
    pytest.param(((3, 3), (2, 2), (1, 1), False), id="padded"),
    pytest.param(((2, 2), (2, 2), (0, 0), False), id="halving"),
    pytest.param(((3, 2), (1, 3), (1, 0), False), id="rectangular"),
    pytest.param(((3, 3), (2, 2), (1, 1), True), id="ceil-padded"),
    pytest.param(((2, 2), (2, 2), (0, 0), True), id="ceil"),
]


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize(("count_padding", "divisor"), [(True, 0), (False, 0), (True, 5)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", AVERAGE_CASES)
def test_average_pool(
    shape: tuple[int, ...], case: tuple[Any, ...], count_padding: bool, divisor: int, layout: str
) -> None:
    x, (kernel, stride, padding, ceil) = random(*shape), case
    windows = windows_of(shape, kernel, stride, padding, (1, 1), ceil)
    y_expected, dx_expected = average_reference(x, *windows, gradient_for, count_padding, divisor)
    pool = average_pool(layout, *case, count_padding=count_padding, divisor=divisor)
    y, dx = run(pool, x, gradient_for(y_expected.shape), layout)
    assert_close(y, y_expected, reduced=math.prod(kernel))
    assert_close(dx, dx_expected, reduced=math.prod(kernel))


@pytest.mark.parametrize("shape", SHAPES)
def test_channels_last_average_pool_leaves_padding_out(shape: tuple[int, ...]) -> None:
    """What nn.AvgPool2d emits for channels last divides by the window without its padding."""
    x = random(*shape)
    rows, columns = windows_of(shape, (3, 3), (2, 1), (1, 1), (1, 1), False)
    y_expected, dx_expected = average_reference(x, rows, columns, gradient_for)
    pool = tf_average_pool((3, 3), (2, 1), (1, 1))
    y, dx = run(pool, x, gradient_for(y_expected.shape), "channels_last")
    assert_close(y, y_expected, reduced=9)
    assert_close(dx, dx_expected, reduced=9)


@pytest.mark.parametrize(("mode", "before"), [("same_upper", 0), ("same_lower", 1), ("valid", 0)])
def test_channels_last_average_pool_padding_modes(mode: str, before: int) -> None:
    x = random(2, 5, 6, 6)
    outputs = 5 if mode == "valid" else 6
    windows = [([t for t in (i - before, i - before + 1) if 0 <= t < 6], 2) for i in range(outputs)]
    y_expected, dx_expected = average_reference(x, windows, windows, gradient_for)
    pool = tf_average_pool((2, 2), (1, 1), (0, 0), mode)
    y, dx = run(pool, x, gradient_for(y_expected.shape), "channels_last")
    assert_close(y, y_expected, reduced=4)
    assert_close(dx, dx_expected, reduced=4)


@pytest.mark.parametrize("outputs", [(1, 1), (3, 2), (7, 7), (12, 10)])
@pytest.mark.parametrize("shape", [(2, 3, 9, 7), (3, 20, 7, 7), (1, 2, 112, 112)])
def test_adaptive_average_pool(shape: tuple[int, ...], outputs: Pair) -> None:
    x = random(*shape)
    rows, columns = adaptive(shape[2], outputs[0]), adaptive(shape[3], outputs[1])
    y_expected, dx_expected = average_reference(x, rows, columns, gradient_for)
    pool = flow.nn.AdaptiveAvgPool2d(outputs)
    y, dx = run(pool, x, gradient_for(y_expected.shape), "channels_first")
    assert_close(y, y_expected, reduced=shape[2] * shape[3] // (outputs[0] * outputs[1]) + 1)
    assert_close(dx, dx_expected, reduced=4)


@pytest.mark.parametrize("outputs", [1, 7])
def test_adaptive_average_pool_as_channels_last_windows(outputs: int) -> None:
    """Where the input is a multiple of the output, windows are equal: channels last uses it."""
    x = random(2, 40, 14, 7)
    rows, columns = adaptive(14, outputs), adaptive(7, outputs)
    y_expected, dx_expected = average_reference(x, rows, columns, gradient_for)
    size = (14 // outputs, 7 // outputs)
    pool = tf_average_pool(size, size, (0, 0))
    y, dx = run(pool, x, gradient_for(y_expected.shape), "channels_last")
    assert_close(y, y_expected, reduced=98)
    assert_close(dx, dx_expected)


LAYOUTS = ["channels_first", "channels_last"]


def pools(layout: str) -> list[Callable[[flow.Tensor], flow.Tensor]]:
    """One of each operator, for square inputs of at least 4 x 4."""
    operators = [
        max_pool(layout, (3, 3), (2, 2), (1, 1), (1, 1), False),
        max_pool(layout, (2, 2), (1, 1), (0, 0), (2, 2), False),
        average_pool(layout, (3, 3), (2, 2), (1, 1), False),
    ]
    if layout == "channels_first":
        return [*operators, flow.nn.AdaptiveAvgPool2d((2, 3))]
    return [*operators, tf_average_pool((3, 3), (2, 2), (1, 1))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_batch(layout: str) -> None:
    shape = (0, 3, 6, 6) if layout == "channels_first" else (0, 6, 6, 3)
    for pool in pools(layout):
        x = flow.zeros(*shape, requires_grad=True)
        y = pool(x)
        y.sum().backward()
        assert y.shape[0] == 0
        assert x.grad.shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_float32_rounded(layout: str) -> None:
    """Gradients too: windows overlap, so that a pixel's is a sum of several."""
    operators = pools(layout)
    if layout == "channels_first":
        x = random(2, 3, 9, 7)
    else:
        # One image of many channels is shared out among threads by its channels.
        x = random(1, 9, 7, 200)
        operators.append(lambda x: pools(layout)[1](x.reshape(2, 9, 7, 100)))
    x = as_held(np.round(4 * x) / 4, "bfloat16")  # Some windows have several maxima.
    for pool in operators:
        dy = as_held(random(*pool(flow.tensor(x)).shape, seed=1), "bfloat16")
        y, (dx,) = gradients(pool, [x], dy, ["bfloat16"])
        expected, (expected_dx,) = gradients(pool, [x], dy)
        np.testing.assert_array_equal(y, as_held(expected, "bfloat16"))
        np.testing.assert_array_equal(dx, as_held(expected_dx, "bfloat16"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_contiguous_input(layout: str) -> None:
    x = random(7, 6, 5, 4)
    for pool in pools(layout):
        view = flow.tensor(x, requires_grad=True)
        copy = flow.tensor(np.ascontiguousarray(x.transpose(3, 1, 0, 2)), requires_grad=True)
        from_view, from_copy = pool(view.permute(3, 1, 0, 2)), pool(copy)
        from_view.square().sum().backward()
        from_copy.square().sum().backward()
        np.testing.assert_array_equal(from_view.numpy(), from_copy.numpy())
        np.testing.assert_array_equal(view.grad.numpy().transpose(3, 1, 0, 2), copy.grad.numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager_equals_graph(layout: str) -> None:
    x = random(2, 6, 6, 6)
    for pool in pools(layout):
        dy = random(*pool(flow.tensor(x)).shape, seed=1)
        assert_eager_equals_graph(pool, [x], dy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_python_threads(layout: str) -> None:
    x = flow.tensor(random(8, 32, 32, 32))
    for pool in pools(layout):
        assert_same_in_threads(lambda pool=pool: pool(x).numpy(), calls=3)


def test_forked_process() -> None:
    assert_same_after_fork(
        """
        x = flow.randn(8, 32, 32, 32, requires_grad=True)
        y = nn.AvgPool2d(2)(nn.MaxPool2d(3, 2, 1)(x))
        (nn.AdaptiveAvgPool2d(3)(y) ** 2).sum().backward()
        return x.grad.numpy()
        """.replace("\n        ", "\n")
    )
