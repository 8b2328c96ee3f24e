"""conv2d_add_activation: the convolution of inference, with all that follows it."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels.convolution import conv2d_add_activation

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Case, Layout, Record, case
from tests.oneflow_accel.kernels.reference_conv import (
    FORMATS,
    LAST,
    ConvCase,
    conv_forward,
    from_format,
    shape_in,
    to_format,
)


def _call(
    x: flow.Tensor,
    weight: flow.Tensor,
    *others: flow.Tensor,
    conv: ConvCase,
    has: str,
    **attributes: str,
) -> flow.Tensor:
    bias, summand = _optional(others, has)
    # The bias is float32 in every convolution.
    bias = None if bias is None else bias.to(flow.float32)
    return conv2d_add_activation(x, weight, bias, summand, owner=0, **conv.geometry, **attributes)


def _reference(
    x: np.ndarray,
    weight: np.ndarray,
    *others: np.ndarray,
    conv: ConvCase,
    has: str,
    data_format: str,
    activation: str,
) -> np.ndarray:
    bias, summand = _optional(others, has)
    x, weight = (from_format(array, data_format) for array in (x, weight))
    y = conv_forward(conv, x, weight, np.zeros(len(weight)) if bias is None else bias)
    y = to_format(y, data_format)
    if summand is not None:
        y = y + summand
    if activation == "silu":
        return y / (1 + np.exp(-y))
    return np.maximum(y, 0) if activation == "relu" else y


def _optional(others: tuple[Any, ...], has: str) -> tuple[Any, Any]:
    """Bias and summand, of those that the case has."""
    given = dict(zip(has.split(), others, strict=True))
    return given.get("bias"), given.get("summand")


def _case(
    name: str,
    conv: ConvCase,
    *,
    data_format: str = LAST,
    has: str = "bias summand",
    activation: str = "relu",
) -> Case:
    others = {"bias": (conv.channels[1],), "summand": shape_in(conv.y_shape, data_format)}
    return case(
        name,
        shape_in(conv.x_shape, data_format),
        shape_in(conv.weight_shape, data_format),
        *(others[name] for name in has.split()),
        reduced=conv.terms["y"] + 1,
        conv=conv,
        data_format=data_format,
        has=has,
        activation=activation,
    )


def _geometry(
    channels: tuple[int, int],
    spatial: tuple[int, int],
    kernel: int,
    *,
    batch: int = 2,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> ConvCase:
    pairs = [(value, value) for value in (kernel, stride, padding, dilation)]
    return ConvCase(batch, channels, spatial, *pairs, groups)


_WIDE = _geometry((64, 80), (9, 7), 3, padding=1)
_CASES = [
    _case("global", _WIDE),
    _case("channels-first", _WIDE, data_format="channels_first"),
    _case("no-relu", _WIDE, activation=""),
    _case("bias-only", _WIDE, has="bias"),
    _case("summand-only", _WIDE, has="summand", activation=""),
    _case("alone", _WIDE, has="", activation=""),
    _case("alone-relu", _WIDE, has="", data_format="channels_first"),
]
for _format in FORMATS:
    _CASES += [
        _case(f"{name}-{_format}", convolution, data_format=_format)
        for name, convolution in {
            "one-pixel": _geometry((1, 1), (1, 1), 1, batch=1),
            "empty-batch": _geometry((6, 10), (9, 11), 3, batch=0, padding=1),
            # There are the bias, the summand and the activation.
            "no-input-channel": _geometry((0, 3), (5, 4), 3, padding=1),
            "odd": _geometry((7, 5), (13, 9), 2, batch=3, stride=2, padding=1),
            "1x1-large-image": _geometry((24, 17), (30, 31), 1),
            "1x1-strided": _geometry((48, 64), (15, 14), 1, stride=2),
            "stem": _geometry((3, 64), (32, 30), 7, stride=2, padding=3),
            "patches": _geometry((3, 50), (24, 16), 8, stride=8),
            "dilated": _geometry((8, 12), (15, 14), 3, padding=2, dilation=2),
            "groups": _geometry((32, 48), (9, 10), 3, padding=1, groups=4),
            "odd-groups": _geometry((15, 9), (8, 7), 3, stride=2, padding=1, groups=3),
            "depthwise": _geometry((40, 40), (11, 12), 3, padding=1, groups=40),
        }.items()
    ]
# Groups of few channels are convolved by kernels of our own.
_GROUPS = _geometry((32, 48), (9, 10), 3, padding=1, groups=8)
_CASES += [
    _case("silu", _WIDE, activation="silu"),
    _case("silu-channels-first", _WIDE, activation="silu", data_format="channels_first"),
    _case("groups-silu", _GROUPS, activation="silu"),
    _case("groups-bias-silu", _GROUPS, activation="silu", has="bias"),
    _case("groups-relu-only", _GROUPS, has=""),
    _case("groups-bias-only", _GROUPS, activation="", has="bias", data_format="channels_first"),
]
_CASES.append(_case("threads", _geometry((64, 64), (56, 56), 3, batch=1, padding=1)))

RECORDS = [
    Record(
        name="conv2d_add_activation",
        operators=("oneflow_accel_conv2d",),
        call=_call,
        reference=_reference,
        cases=_CASES,
        not_finite=Strictness.REGROUPED,
        layouts=(Layout(("S(0)", "B", "B", "S(0)"), "S(0)"), Layout(("B", "B", "B", "B"), "B")),
        dtypes=("float32", "bfloat16"),
    )
]
