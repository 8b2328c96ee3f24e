"""OneFlow's conv1d, conv2d and conv3d, in both data formats."""

from __future__ import annotations

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Case, Record, case
from tests.oneflow_accel.kernels.reference_conv import (
    FORMATS,
    ConvCase,
    conv_forward,
    conv_gradients,
    from_format,
    shape_in,
    to_format,
)


def convolve(
    x: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor | None = None,
    *,
    conv: ConvCase,
    data_format: str,
) -> flow.Tensor:
    return getattr(flow._C, f"conv{len(conv.spatial)}d")(
        x, weight, bias, **conv.geometry, channel_pos=data_format
    )


def _reference(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, conv: ConvCase, data_format: str
) -> np.ndarray:
    x, weight = (from_format(array, data_format) for array in (x, weight))
    return to_format(conv_forward(conv, x, weight, bias), data_format)


def _gradient(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    conv: ConvCase,
    data_format: str,
) -> tuple[np.ndarray, ...]:
    x, weight, dy = (from_format(array, data_format) for array in (x, weight, dy))
    dx, dw, db = conv_gradients(conv, x, weight, dy)
    return to_format(dx, data_format), to_format(dw, data_format), db


def _case(
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


CASES = {
    "one-pixel": _case((1, 1), (1, 1), (1, 1), batch=1),
    "odd": _case((7, 5), (13, 9), (2, 3), batch=3, stride=(2, 1), padding=(1, 0)),
    "1x1": _case((64, 40), (8, 7), (1, 1)),
    "1x1-large-image": _case((24, 17), (30, 31), (1, 1)),
    "1x1-strided": _case((48, 64), (15, 14), (1, 1), stride=(2, 2)),
    "1x1-padded": _case((5, 6), (6, 5), (1, 1), padding=(2, 1)),
    "3x3": _case((6, 10), (9, 11), (3, 3), padding=(1, 1)),
    "3x3-wide": _case((64, 72), (10, 9), (3, 3), padding=(1, 1)),
    "3x3-strided": _case((32, 48), (14, 13), (3, 3), stride=(2, 2), padding=(1, 1)),
    "stem": _case((3, 64), (32, 30), (7, 7), stride=(2, 2), padding=(3, 3)),
    "patches": _case((3, 50), (24, 16), (8, 8), stride=(8, 8)),
    "row-kernel": _case((8, 9), (5, 17), (1, 7), padding=(0, 3)),
    "unread-border": _case((8, 8), (12, 12), (3, 3), stride=(4, 3)),
    "dilated": _case((8, 12), (15, 14), (3, 3), padding=(2, 3), dilation=(2, 3)),
    "groups": _case((32, 48), (9, 10), (3, 3), padding=(1, 1), groups=4),
    "odd-groups": _case((15, 9), (8, 7), (3, 2), stride=(2, 2), padding=(1, 1), groups=3),
    "few-channels": _case((48, 64), (14, 13), (3, 3), padding=(1, 1), groups=16),
    "few-channels-dilated": _case(
        (20, 30), (9, 17), (2, 3), padding=(1, 2), dilation=(2, 2), groups=5
    ),
    "depthwise": _case((40, 40), (11, 12), (3, 3), padding=(1, 1), groups=40),
    "depthwise-strided": _case((16, 16), (15, 9), (5, 5), stride=(2, 2), padding=(2, 2), groups=16),
    "depthwise-twice": _case((12, 24), (7, 8), (3, 3), padding=(1, 1), groups=12),
    "empty-batch": _case((6, 10), (9, 11), (3, 3), batch=0, padding=(1, 1)),
    "conv1d": ConvCase(2, (6, 8), (23,), (5,), (2,), (2,), (1,), 2),
    "conv3d": ConvCase(2, (4, 6), (5, 6, 7), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1),
    # oneDNN's bfloat16 products take 2 or 32 terms at a time, and multiply by 0 what a convolution
    # has no part in: where there is NaN.
    "17-channels": _case((17, 16), (6, 7), (3, 3), padding=(1, 1)),
    "one-channel": _case((1, 16), (6, 7), (5, 5), padding=(1, 1)),
}


def _in_both_formats() -> list[Case]:
    return [
        case(
            f"{name} {data_format}",
            shape_in(conv.x_shape, data_format),
            shape_in(conv.weight_shape, data_format),
            (conv.channels[1],),
            reduced=max(conv.terms.values()),
            conv=conv,
            data_format=data_format,
        )
        for name, conv in CASES.items()
        for data_format in FORMATS
    ]


RECORDS = [
    Record(
        "conv2d",
        ("conv1d", "conv2d", "conv3d", "conv_data_grad", "conv_filter_grad"),
        convolve,
        _reference,
        _in_both_formats(),
        gradient=_gradient,
        dtypes=("float32", "bfloat16"),
        gradient_dtypes=("float32", "bfloat16"),
        not_finite=Strictness.REGROUPED,
    )
]
