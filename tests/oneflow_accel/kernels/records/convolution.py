"""channels_last_conv2d: activations (N, H, W, C), weights in the standard order."""

from __future__ import annotations

from oneflow_accel.kernels.convolution import channels_last_conv2d

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Case, Layout, Record, case
from tests.oneflow_accel.kernels.reference_conv import (
    LAST,
    ConvCase,
    conv_forward,
    conv_gradients,
    from_format,
    to_format,
)


def _call(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor | None = None, *, conv: ConvCase
) -> flow.Tensor:
    return channels_last_conv2d(x, weight, bias, **conv.geometry)


def _reference(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, *, conv: ConvCase
) -> np.ndarray:
    added = np.zeros(len(weight)) if bias is None else bias
    return to_format(conv_forward(conv, from_format(x, LAST), weight, added), LAST)


def _gradient(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    conv: ConvCase,
) -> tuple[np.ndarray, ...]:
    dx, dw, db = conv_gradients(conv, from_format(x, LAST), weight, from_format(dy, LAST))
    dx = to_format(dx, LAST)
    return (dx, dw) if bias is None else (dx, dw, db)


def _case(
    name: str,
    channels: tuple[int, int],
    spatial: tuple[int, int],
    kernel: tuple[int, int] = (3, 3),
    *,
    batch: int = 2,
    stride: int = 1,
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    bias: bool = True,
) -> Case:
    strides = (stride, stride)
    conv = ConvCase(batch, channels, spatial, kernel, strides, padding, dilation, groups)
    inputs = [(batch, *spatial, channels[0]), conv.weight_shape, (channels[1],)]
    return case(name, *inputs[: 3 if bias else 2], reduced=max(conv.terms.values()), conv=conv)


_CASES = [
    _case("one pixel", (1, 1), (1, 1), (1, 1), batch=1, padding=(0, 0)),
    _case("one group", (24, 40), (9, 7)),
    _case("stem", (3, 64), (32, 24), (7, 7), stride=4, padding=(8, 8), dilation=(3, 3)),
    _case("pyramid", (16, 32), (14, 12), stride=2, padding=(3, 3), dilation=(3, 3)),
    _case("strided groups", (16, 32), (9, 9), stride=2, groups=4),
    _case("depthwise", (16, 16), (7, 6), groups=16),
    # Below, convolutions that are computed in planes: ViTAE's, of 4 to 12 channels in a group, ...
    _case("groups 4 to 8", (64, 128), (14, 14), groups=16),
    _case("groups 8 to 4", (128, 64), (14, 14), groups=16),
    _case("groups 4 to 4", (128, 128), (6, 6), groups=32),
    _case("groups 4 to 12", (28, 84), (7, 5), groups=7),
    _case("groups 12 to 4", (84, 28), (7, 5), groups=7),
    # ... and what is odd about others.
    _case("odd groups", (15, 9), (8, 7), (3, 2), groups=3),
    _case("groups to one", (10, 2), (5, 9), (1, 3), padding=(0, 1), groups=2),
    _case("groups from one", (5, 65), (4, 4), groups=5),
    _case("dilated groups", (24, 36), (11, 10), padding=(2, 3), dilation=(2, 3), groups=6),
    _case("shrinking groups", (16, 24), (10, 37), (5, 3), padding=(0, 0), groups=4),
    _case("growing groups", (16, 24), (5, 4), padding=(2, 2), groups=4),
    _case("pointwise groups", (24, 16), (6, 5), (1, 1), padding=(0, 0), groups=8),
    _case("groups alone", (12, 18), (6, 5), groups=3, bias=False),
    _case("no image", (16, 24), (5, 4), batch=0, groups=4),
    _case("global", (16, 24), (5, 4), groups=4),
]

RECORDS = [
    Record(
        name="channels_last_conv2d",
        operators=(
            "oneflow_accel_channels_last_conv2d",
            "oneflow_accel_channels_last_conv2d_data_grad",
            "oneflow_accel_channels_last_conv2d_filter_grad",
        ),
        call=_call,
        not_finite=Strictness.REGROUPED,
        reference=_reference,
        gradient=_gradient,
        cases=_CASES,
        dtypes=("float32", "bfloat16"),
        gradient_dtypes=("float32", "bfloat16"),
        layouts=[
            Layout(inputs=("B", "B", "B"), output="B"),
            Layout(inputs=("S(0)", "B", "B"), output="S(0)"),
        ],
    )
]
