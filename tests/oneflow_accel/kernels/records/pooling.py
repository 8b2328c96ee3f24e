"""Max, average and adaptive average pooling, in both layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Case, Input, Record, Shape, case
from tests.oneflow_accel.kernels.reference_pooling import (
    Pair,
    Window,
    adaptive,
    average_reference,
    max_reference,
    windows_of,
)

LAYOUTS = ("channels_first", "channels_last")
BOTH = ("float32", "bfloat16")
IMAGES = (2, 3, 9, 7)
MANY_CHANNELS = (1, 70, 8, 11)
Windows = tuple[list[Window], list[Window]]


def to_layout(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "channels_first" else np.ascontiguousarray(np.moveaxis(x, 1, -1))


def to_first(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "channels_first" else np.moveaxis(x, -1, 1)


def _shape(shape: Shape, layout: str) -> Shape:
    return shape if layout == "channels_first" else (shape[0], *shape[2:], shape[1])


def _ties(shape: Shape) -> Input:
    """Few different values, so that most windows have several maxima: the first one counts."""
    return lambda generator: np.round(generator.standard_normal(shape))


def _record(
    name: str,
    operators: tuple[str, ...],
    call: Callable[..., flow.Tensor],
    results: Callable[..., tuple[np.ndarray, np.ndarray]],
    cases: list[Case],
    not_finite: Strictness = Strictness.REGROUPED,
) -> Record:
    """`results` takes x, channels first, the function that gives dy of a shape, and attributes; it
    gives y and dx."""

    def reference(x: np.ndarray, layout: str, **attributes: Any) -> np.ndarray:
        return to_layout(results(to_first(x, layout), np.zeros, **attributes)[0], layout)

    def gradient(
        dy: np.ndarray, x: np.ndarray, layout: str, **attributes: Any
    ) -> tuple[np.ndarray]:
        def given(shape: Shape) -> np.ndarray:
            return to_first(dy, layout)

        return (to_layout(results(to_first(x, layout), given, **attributes)[1], layout),)

    return Record(
        name,
        operators,
        call,
        reference,
        cases,
        gradient=gradient,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
        not_finite=not_finite,
    )


def max_pool(x: flow.Tensor, layout: str, indices: bool = False, **attributes: Any) -> Any:
    outputs = flow._C.max_pool2d(
        x, return_indices=indices, data_format=layout, **_all_sizes(**attributes)
    )
    return outputs if indices else outputs[0]


def _all_sizes(
    kernel: Pair, stride: Pair, padding: Pair = (0, 0), dilation: Pair = (1, 1), ceil: bool = False
) -> dict[str, Any]:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    return dict(zip(names, (kernel, stride, padding, dilation, ceil), strict=True))


def _windows(x: np.ndarray, **attributes: Any) -> Windows:
    return windows_of(x.shape, *_all_sizes(**attributes).values())


def _max(x: np.ndarray, dy_of: Callable, **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
    y, _, dx = max_reference(x, *_windows(x, **attributes), dy_of)
    return y, dx


def _average_call(
    x: flow.Tensor, layout: str, count_padding: bool = True, divisor: int = 0, **attributes: Any
) -> flow.Tensor:
    sizes = _all_sizes(**attributes)
    del sizes["dilation"]
    return flow._C.avg_pool2d(
        x,
        count_include_pad=count_padding,
        divisor_override=divisor,
        data_format=layout,
        **sizes,
    )


def _average(
    x: np.ndarray, dy_of: Callable, count_padding: bool = True, divisor: int = 0, **attributes: Any
) -> tuple[np.ndarray, np.ndarray]:
    return average_reference(x, *_windows(x, **attributes), dy_of, count_padding, divisor)


def _inside_call(x: flow.Tensor, layout: str, kernel: Pair, stride: Pair, padding: Pair) -> Any:
    return flow._C.avg_pool2d_nhwc(
        x,
        kernel_size=kernel,
        stride=stride,
        padding="customized",
        padding_before=padding,
        padding_after=padding,
        ceil_mode=False,
        data_format=layout,
    )


def _inside(x: np.ndarray, dy_of: Callable, **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
    return average_reference(x, *_windows(x, **attributes), dy_of)


def _adaptive_call(x: flow.Tensor, layout: str, outputs: Pair) -> flow.Tensor:
    return flow.nn.AdaptiveAvgPool2d(outputs)(x)


def _adaptive(x: np.ndarray, dy_of: Callable, outputs: Pair) -> tuple[np.ndarray, np.ndarray]:
    windows = (adaptive(size, count) for size, count in zip(x.shape[2:], outputs, strict=True))
    return average_reference(x, *windows, dy_of)


def _of_both_layouts(
    sizes: dict[str, tuple[Shape, dict[str, Any]]], make: Callable[[Shape], Input] = lambda s: s
) -> list[Case]:
    return [
        case(
            f"{name} {layout}",
            make(_shape(shape, layout)),
            reduced=math.prod(attributes["kernel"]),
            layout=layout,
            **attributes,
        )
        for name, (shape, attributes) in sizes.items()
        for layout in LAYOUTS
    ]


STEM = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
HALVING = {"kernel": (2, 2), "stride": (2, 2)}
RECTANGULAR = {"kernel": (3, 2), "stride": (1, 3), "padding": (1, 0)}
MAX_SIZES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "stem": (IMAGES, STEM),
    "halving": ((3, 16, 7, 7), HALVING),
    "rectangular": (IMAGES, RECTANGULAR),
    "ceil": (IMAGES, {"kernel": (3, 3), "stride": (2, 2), "ceil": True}),
    "ceil-padded": (MANY_CHANNELS, {**STEM, "ceil": True}),
    "dilated": (
        IMAGES,
        {"kernel": (2, 3), "stride": (1, 2), "padding": (1, 1), "dilation": (2, 3)},
    ),
    "dilated-ceil": (
        MANY_CHANNELS,
        {
            "kernel": (3, 3),
            "stride": (2, 1),
            "padding": (1, 1),
            "dilation": (2, 1),
            "ceil": True,
        },
    ),
    "identity": (IMAGES, {"kernel": (1, 1), "stride": (1, 1)}),
    # Both taps miss an input of two rows. (Too large for differences of -infinity.)
    "no-input": (
        (8, 32, 2, 2),
        {"kernel": (2, 2), "stride": (1, 1), "padding": (1, 1), "dilation": (3, 3)},
    ),
    "no-image": ((0, 3, 6, 6), STEM),
}
_TIES = {"ties": (MANY_CHANNELS, STEM), "ties-large": ((3, 32, 21, 20), STEM)}
_AVERAGES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "padded": (IMAGES, STEM),
    "halving": ((3, 16, 7, 7), HALVING),
    "rectangular": (IMAGES, RECTANGULAR),
    "ceil-padded": (MANY_CHANNELS, {**STEM, "ceil": True}),
    "ceil": (IMAGES, {**HALVING, "ceil": True}),
    "without-padding": (IMAGES, {**STEM, "count_padding": False}),
    "without-padding-ceil": (MANY_CHANNELS, {**STEM, "ceil": True, "count_padding": False}),
    "divisor": (IMAGES, {**STEM, "divisor": 5}),
    "no-image": ((0, 3, 6, 6), STEM),
}
_INSIDE = {
    "steps": (IMAGES, {"kernel": (3, 3), "stride": (2, 1), "padding": (1, 1)}),
    "many-channels": (MANY_CHANNELS, STEM),
    # What an adaptive pool of equal windows is there.
    "whole": ((2, 40, 14, 7), {"kernel": (14, 7), "stride": (14, 7), "padding": (0, 0)}),
    "no-image": ((0, 3, 6, 6), STEM),
}
_ADAPTIVE = [
    case(f"{shape} to {outputs}", shape, reduced=terms, layout="channels_first", outputs=outputs)
    for shape, outputs, terms in (
        (IMAGES, (1, 1), 63),
        (IMAGES, (3, 2), 16),
        (IMAGES, (12, 10), 4),
        ((3, 20, 7, 7), (7, 7), 1),
        ((1, 2, 112, 112), (7, 7), 256),
        ((0, 3, 6, 6), (2, 3), 1),
    )
]

RECORDS = [
    _record(
        "max_pool2d",
        ("max_pool_2d", "max_pool_2d_grad"),
        max_pool,
        _max,
        [*_of_both_layouts(MAX_SIZES), *_of_both_layouts(_TIES, _ties)],
        not_finite=Strictness.EXACT,
    ),
    _record(
        "avg_pool2d",
        ("avg_pool_2d", "avg_pool_2d_grad"),
        _average_call,
        _average,
        _of_both_layouts(_AVERAGES),
    ),
    _record(
        "avg_pool2d_nhwc",
        ("tf_avg_pool_2d", "tf_avg_pool_2d_grad"),
        _inside_call,
        _inside,
        [one for one in _of_both_layouts(_INSIDE) if one.attributes["layout"] == LAYOUTS[1]],
    ),
    _record(
        "adaptive_avg_pool2d",
        ("adaptive_avg_pool2d", "adaptive_avg_pool2d_grad"),
        _adaptive_call,
        _adaptive,
        _ADAPTIVE,
    ),
]
