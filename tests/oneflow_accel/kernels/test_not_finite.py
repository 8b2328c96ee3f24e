"""NaN and infinity through what has no record: norms, pooling, a GPT-2 block, conversions."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.kernels.convolution import conv2d_add_activation

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels import test_decoder_layer as block
from tests.oneflow_accel.kernels.harness import as_array, as_held, gradients, needs_plugin, random
from tests.oneflow_accel.kernels.test_normalization import batch_norm, batch_norm_add_relu

pytestmark = needs_plugin

VALUES = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("value", VALUES)
def test_maximum_of_a_window(value: float, last: bool) -> None:
    """The largest of a window, NaN where one is in it; the gradient goes to where it was found."""
    x = random(2, 3, 9, 8)
    x[1, 2, 4, 5] = value
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    expected = windows.max((-2, -1))
    dy = random(*expected.shape, seed=1)
    if last:

        def pool(tensor: flow.Tensor) -> flow.Tensor:
            return flow._C.max_pool2d(
                tensor.permute(0, 2, 3, 1).contiguous(),
                kernel_size=(3, 3),
                stride=(1, 1),
                padding=(0, 0),
                dilation=(1, 1),
                return_indices=True,
                ceil_mode=False,
                data_format="channels_last",
            )[0].permute(0, 3, 1, 2)
    else:

        def pool(tensor: flow.Tensor) -> flow.Tensor:
            return nn.functional.max_pool2d(tensor, 3, stride=1)

    y, (dx,) = gradients(pool, [x], dy)
    np.testing.assert_array_equal(y, expected)
    found = dy[1, 2][~np.isfinite(expected[1, 2])].sum()
    np.testing.assert_allclose(dx[1, 2, 4, 5], found, rtol=1e-5)


@pytest.mark.parametrize("value", VALUES)
def test_means_of_windows(value: float) -> None:
    x = random(2, 3, 6, 8)
    x[1, 2, 4, 5] = value
    expected = x.reshape(2, 3, 3, 2, 4, 2).mean((3, 5))
    for pool in (lambda t: nn.functional.avg_pool2d(t, 2), nn.AdaptiveAvgPool2d((3, 4))):
        y = pool(flow.tensor(x)).numpy()
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["x", "addend", "weight", "bias", "running_mean", "running_var"])
def test_batch_norm_with_relu(where: str, value: float, training: bool) -> None:
    """As the norm, the addition and relu one after the other."""
    arrays = {
        "x": random(4, 3, 5, 7),
        "addend": random(4, 3, 5, 7, seed=1),
        "weight": random(3),
        "bias": random(3, seed=1),
        "running_mean": random(3, seed=2),
        "running_var": random(3, seed=3) ** 2,
    }
    arrays[where].reshape(-1)[1] = value
    x, addend, weight, bias, mean, variance = (
        array.astype(np.float64) for array in arrays.values()
    )
    if training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    shape = (1, 3, 1, 1)
    with np.errstate(all="ignore"):
        normal = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + 1e-5)
        expected = normal * weight.reshape(shape) + bias.reshape(shape) + addend
        expected = np.where(expected <= 0, 0.0, expected)
    tensors = {name: flow.tensor(array) for name, array in arrays.items()}
    y = flow._C.normalization_add_relu(
        tensors["x"],
        tensors["addend"],
        tensors["running_mean"],
        tensors["running_var"],
        tensors["weight"],
        tensors["bias"],
        axis=1,
        epsilon=1e-5,
        momentum=0.9,
        is_training=training,
    ).numpy()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)


def test_decoder_layer_hides_no_nan() -> None:
    shape = (3, 2, 5, 8, 20)
    names = len(block.arrays(*shape))
    for index in range(names):
        inputs = block.arrays(*shape)
        # Of one head's keys and values: of the last sequence. Parameters belong to all.
        inputs[index].reshape(-1)[-1] = np.nan
        y, keys, values = (
            t.numpy()
            for t in block.decoder_layer(*block.tensors(inputs), **block.SETTINGS, tanh=True)
        )
        assert np.isnan(y[-1]).any(), f"input {index}"
        if index < 3:
            assert np.isfinite(y[:-1]).all(), f"input {index}"
        wanted, wanted_keys, wanted_values = block.expected(inputs, tanh=True)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))
        np.testing.assert_array_equal(np.isnan(keys), np.isnan(wanted_keys))
        np.testing.assert_array_equal(np.isnan(values), np.isnan(wanted_values))


def _conv(channels_last: bool) -> Callable[..., flow.Tensor]:
    form = "channels_last" if channels_last else "channels_first"

    def convolve(x: flow.Tensor, weight: flow.Tensor) -> flow.Tensor:
        if channels_last:
            x, weight = (tensor.permute(0, 2, 3, 1) for tensor in (x, weight))
        y = flow._C.conv2d(x, weight, None, padding=(1, 1), channel_pos=form)
        return y.permute(0, 3, 1, 2) if channels_last else y

    return convolve


def _norm(x: flow.Tensor, gamma: flow.Tensor, beta: flow.Tensor) -> flow.Tensor:
    return batch_norm(x, gamma, beta, axis=1)


def _norm_relu(x: flow.Tensor, addend: flow.Tensor, gamma: flow.Tensor) -> flow.Tensor:
    return batch_norm_add_relu(x, gamma, flow.zeros(3), 1, addend)


IMAGE, CHANNELS = (2, 3, 6, 7), (3,)
# (input channels, output channels, kernel): oneDNN's bfloat16 products take 2 or 32 terms at a
# time, and multiply by 0 what a convolution has no part in.
CONVOLUTIONS = [(16, 17, 3), (3, 5, 3), (1, 16, 5), (17, 16, 3), (5, 7, 1), (3, 64, 7), (64, 64, 3)]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        *(
            (_conv(last), [(2, inputs, 6, 7), (outputs, inputs, size, size)])
            for last in (False, True)
            for inputs, outputs, size in CONVOLUTIONS
        ),
        (_norm, [IMAGE, CHANNELS, CHANNELS]),
        (_norm_relu, [IMAGE, IMAGE, CHANNELS]),
        (lambda x: nn.functional.max_pool2d(x, 3, stride=1), [IMAGE]),
        (lambda x: nn.functional.avg_pool2d(x, 3, stride=1), [IMAGE]),
        (nn.AdaptiveAvgPool2d((3, 4)), [IMAGE]),
    ],
    ids=[
        *(f"conv-{last}-{c}" for last in ("first", "last") for c in CONVOLUTIONS),
        "norm",
        "norm-add-relu",
        "max",
        "average",
        "adaptive",
    ],
)
def test_bfloat16_has_the_classes_of_float32(
    fn: Callable[..., flow.Tensor], shapes: list[tuple[int, ...]], value: float
) -> None:
    """NaN and infinity in an input or in the output's gradient, forward and backward."""
    clean = [as_held(random(*shape, seed=i), "bfloat16") for i, shape in enumerate(shapes)]
    dy = as_held(random(*fn(*map(flow.tensor, clean)).shape, seed=9), "bfloat16")
    for index in range(len(shapes) + 1):
        *arrays, weight = (array.copy() for array in (*clean, dy))
        [*arrays, weight][index].reshape(-1)[-2] = value
        dtypes = ["bfloat16" if array.ndim > 1 else "float32" for array in arrays]
        y, grads = gradients(fn, arrays, weight, dtypes)
        wide, wide_grads = gradients(fn, arrays, weight)
        for mine, expected in zip((y, *grads), (wide, *wide_grads), strict=True):
            np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(expected))
            np.testing.assert_array_equal(np.isnan(mine), np.isnan(expected))


@pytest.mark.parametrize("activation", ["", "relu", "silu"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_bfloat16_of_inference_has_the_classes_of_float32(
    sizes: tuple[int, int, int], last: bool, activation: str
) -> None:
    inputs, outputs, size = sizes
    shapes = [(2, 6, 7, inputs), (outputs, size, size, inputs)]
    settings = {
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": 1,
        "data_format": "channels_last" if last else "channels_first",
        "activation": activation,
        "owner": 0,
    }
    for index in range(2):
        arrays = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
        arrays[index].reshape(-1)[-2] = np.nan
        if not last:
            arrays = [array.transpose(0, 3, 1, 2) for array in arrays]
        found = [
            conv2d_add_activation(
                *(flow.tensor(array).to(dtype) for array in arrays), None, None, **settings
            )
            for dtype in (flow.bfloat16, flow.float32)
        ]
        np.testing.assert_array_equal(*(np.isfinite(as_array(y)) for y in found))


def _nan_of_bits(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def _repeated(array: np.ndarray) -> np.ndarray:
    """In vectors and in what is left over after them."""
    return np.tile(array, 67)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.to(flow.bfloat16),
        lambda x: x.to(flow.bfloat16) + x.to(flow.bfloat16),
        lambda x: flow.relu(x.to(flow.bfloat16)),
        lambda x: flow._C.gelu(x.to(flow.bfloat16)),
        lambda x: flow._C.silu(x.to(flow.bfloat16)),
    ],
    ids=["cast", "add", "relu", "gelu", "silu"],
)
def test_nan_of_any_bits_stays_nan_in_bfloat16(
    compute: Callable[[flow.Tensor], flow.Tensor],
) -> None:
    """Rounding the bits of a NaN would make infinity of some and 0 of others."""
    x = _repeated(_nan_of_bits(0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000))
    assert np.isnan(compute(flow.tensor(x)).to(flow.float32).numpy()).all()


def test_largest_floats_round_to_infinity_in_bfloat16() -> None:
    largest = np.finfo(np.float32).max
    x = _repeated(np.array([largest, -largest, 3.3e38, np.inf, -np.inf], np.float32))
    y = flow.tensor(x).to(flow.bfloat16).to(flow.float32).numpy()
    bits = np.array([0x7F800000, 0xFF800000, 0x7F780000, 0x7F800000, 0xFF800000], np.uint32)
    np.testing.assert_allclose(y[2::5], 3.3e38, rtol=4e-3)
    for k in (0, 1, 3, 4):
        np.testing.assert_array_equal(y[k::5].view(np.uint32), np.full(67, bits[k]))


HUGE = (1e10, 1e20, 1e30, 3e38)


@pytest.mark.parametrize(
    ("function", "level"),
    [
        (flow._C.gelu, 1.0),
        (flow._C.silu, 1.0),
        (flow._C.quick_gelu, 1.0),
        (lambda x: flow._C.gelu_with_approximate(x, "tanh"), 1.0),
    ],
    ids=["gelu", "silu", "quick_gelu", "gelu_tanh"],
)
def test_gates_are_level_far_out(function: Callable[..., flow.Tensor], level: float) -> None:
    """f(x) is x or 0, and its slope 1 or 0, up to the largest number; NaN at infinity."""
    x = np.array([*HUGE, *(-value for value in HUGE), np.inf, -np.inf, np.nan] * 5, np.float32)
    y, (dx,) = gradients(function, [x], np.ones_like(x))
    slopes = np.array([level] * 4 + [0.0] * 4 + [np.nan] * 3)
    np.testing.assert_array_equal(dx, np.tile(slopes, 5))
    values = np.array([*x[:4], *[0.0] * 4, np.inf, np.nan, np.nan])
    np.testing.assert_allclose(y, np.tile(values, 5), rtol=1e-6)
