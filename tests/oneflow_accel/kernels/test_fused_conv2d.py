"""oneflow_accel_conv2d and conv2d beyond their records: no bfloat16 products, no terms."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels.convolution import channels_last_conv2d, conv2d_add_activation

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import needs_plugin, random

pytestmark = needs_plugin

_CONVOLUTION = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "owner": 0}


@pytest.mark.parametrize("data_format", ["channels_first", "channels_last"])
@pytest.mark.parametrize("dtype", [flow.float32, flow.bfloat16], ids=str)
def test_fused_convolution_of_no_terms(dtype: flow.dtype, data_format: str) -> None:
    """Without an input channel there is the bias, the summand and the activation."""
    shape = (2, 3, 5, 4) if data_format == "channels_first" else (2, 5, 4, 3)
    x = flow.zeros(*((2, 0, 5, 4) if data_format == "channels_first" else (2, 5, 4, 0)))
    weight = flow.zeros(*((3, 0, 3, 3) if data_format == "channels_first" else (3, 3, 3, 0)))
    bias = np.array([1.0, -0.5, 2.0], np.float32)
    summand = np.round(random(*shape) * 4) / 4
    along = bias.reshape((1, 3, 1, 1) if data_format == "channels_first" else (1, 1, 1, 3))

    def compute(bias: np.ndarray | None, summand: np.ndarray | None) -> np.ndarray:
        y = conv2d_add_activation(
            x.to(dtype),
            weight.to(dtype),
            None if bias is None else flow.tensor(bias),
            None if summand is None else flow.tensor(summand).to(dtype),
            data_format=data_format,
            activation="relu",
            **_CONVOLUTION,
        )
        return y.to(flow.float32).numpy()

    np.testing.assert_array_equal(compute(None, None), np.zeros(shape))
    np.testing.assert_array_equal(compute(bias, None), np.maximum(along, 0) + np.zeros(shape))
    np.testing.assert_array_equal(compute(bias, summand), np.maximum(along + summand, 0))


@pytest.mark.parametrize("bias", [None, (1.0, -2.0, 3.0)])
def test_channels_last_convolution_of_no_terms(bias: Any) -> None:
    """OneFlow's own conv2d refuses it."""
    y = channels_last_conv2d(
        flow.zeros(2, 4, 5, 0),
        flow.zeros(3, 0, 1, 1),
        None if bias is None else flow.tensor(bias),
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        groups=1,
    )
    expected = np.zeros((2, 4, 5, 3)) + np.array(bias or (0, 0, 0))
    np.testing.assert_array_equal(y.numpy(), expected)
