"""Pooling beyond its records: positions of maxima, padding modes."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import gradients, needs_plugin, random
from tests.oneflow_accel.kernels.records import pooling as record
from tests.oneflow_accel.kernels.reference_pooling import average_reference, max_reference
from tests.tolerances import assert_close

pytestmark = needs_plugin


def _dy(shape: tuple[int, ...]) -> np.ndarray:
    return random(*shape, seed=1)


@pytest.mark.parametrize("layout", record.LAYOUTS)
@pytest.mark.parametrize("name", [name for name in record.MAX_SIZES if name != "no-image"])
def test_positions_of_maxima(name: str, layout: str) -> None:
    shape, attributes = record.MAX_SIZES[name]
    x = np.round(random(*shape))
    windows = record._windows(x, **attributes)
    y, position, dx = max_reference(x, *windows, _dy)
    tensor = flow.tensor(record.to_layout(x, layout), requires_grad=True)
    found, index = record.max_pool(tensor, layout, indices=True, **attributes)
    found.backward(flow.tensor(record.to_layout(_dy(y.shape), layout)))
    np.testing.assert_array_equal(record.to_first(found.numpy(), layout), y)
    assert_close(record.to_first(tensor.grad.numpy(), layout), dx, reduced=9)
    if layout == "channels_last":
        # An offset in the (H, W, C) image, as in oneflow's own kernel.
        position = np.where(
            position < 0, position, position * shape[1] + np.arange(shape[1])[:, None, None]
        )
    covered = position >= 0
    np.testing.assert_array_equal(
        record.to_first(index.numpy(), layout)[covered], position[covered]
    )


@pytest.mark.parametrize(("mode", "before"), [("same_upper", 0), ("same_lower", 1), ("valid", 0)])
def test_channels_last_average_pool_padding_modes(mode: str, before: int) -> None:
    x = random(2, 5, 6, 6)
    outputs = 5 if mode == "valid" else 6
    windows = [([t for t in (i - before, i - before + 1) if 0 <= t < 6], 2) for i in range(outputs)]
    expected, expected_dx = average_reference(x, windows, windows, _dy)

    def pool(x: flow.Tensor) -> Any:
        return flow._C.avg_pool2d_nhwc(
            x,
            kernel_size=(2, 2),
            stride=(1, 1),
            padding=mode,
            padding_before=(0, 0),
            padding_after=(0, 0),
            ceil_mode=False,
            data_format="channels_last",
        )

    dy = record.to_layout(_dy(expected.shape), "channels_last")
    y, (dx,) = gradients(pool, [record.to_layout(x, "channels_last")], dy)
    assert_close(np.moveaxis(y, -1, 1), expected, reduced=4)
    assert_close(np.moveaxis(dx, -1, 1), expected_dx, reduced=4)


def test_the_mean_of_an_empty_image_is_0() -> None:
    """That of stock OneFlow is NaN (csrc/README.md)."""
    y = flow.nn.AdaptiveAvgPool2d(1)(flow.zeros(1, 2, 0, 0))
    np.testing.assert_array_equal(y.numpy(), np.zeros((1, 2, 1, 1)))
