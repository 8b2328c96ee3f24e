"""NaN and infinity through what has no record: bits of NaN, large floats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin


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
    bits = [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000]
    x = _repeated(np.array(bits, np.uint32).view(np.float32))
    assert np.isnan(compute(flow.tensor(x)).to(flow.float32).numpy()).all()


def test_largest_floats_round_to_infinity_in_bfloat16() -> None:
    largest = np.finfo(np.float32).max
    x = _repeated(np.array([largest, -largest, 3.3e38, np.inf, -np.inf], np.float32))
    y = flow.tensor(x).to(flow.bfloat16).to(flow.float32).numpy()
    bits = np.array([0x7F800000, 0xFF800000, 0x7F780000, 0x7F800000, 0xFF800000], np.uint32)
    np.testing.assert_allclose(y[2::5], 3.3e38, rtol=4e-3)
    for k in (0, 1, 3, 4):
        np.testing.assert_array_equal(y[k::5].view(np.uint32), np.full(67, bits[k]))
