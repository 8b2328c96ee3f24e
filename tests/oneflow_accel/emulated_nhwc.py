"""Channels-last convolution, batch normalization and pooling made of the channels-first operators.

With them a converted model runs on stock kernels: its conversion is tested apart from others.
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
import pytest


def _first(x: flow.Tensor) -> flow.Tensor:
    return x.permute(0, 3, 1, 2)


def _last(x: flow.Tensor) -> flow.Tensor:
    return x.permute(0, 2, 3, 1)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    stock_conv2d = flow._C.conv2d
    stock_normalization = flow._C.normalization
    stock_max_pool2d = flow._C.max_pool2d

    def conv2d(x: Any, weight: Any, bias: Any, *, channel_pos: str, **options: Any) -> Any:
        if channel_pos == "channels_last":
            options["channel_pos"] = "channels_first"
            return _last(stock_conv2d(_first(x), _first(weight), bias, **options))
        return stock_conv2d(x, weight, bias, channel_pos=channel_pos, **options)

    def normalization(x: Any, *statistics: Any, axis: int, **options: Any) -> Any:
        if axis == 3:
            return _last(stock_normalization(_first(x), *statistics, axis=1, **options))
        return stock_normalization(x, *statistics, axis=axis, **options)

    def max_pool2d(x: Any, *, data_format: str, **options: Any) -> Any:
        if data_format == "channels_last":
            options["data_format"] = "channels_first"
            return [_last(stock_max_pool2d(_first(x), **options)[0])]
        return stock_max_pool2d(x, data_format=data_format, **options)

    monkeypatch.setattr(flow._C, "conv2d", conv2d)
    monkeypatch.setattr(flow._C, "normalization", normalization)
    monkeypatch.setattr(flow._C, "max_pool2d", max_pool2d)
