"""Activations beyond their records: special values, bfloat16."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    Function,
    gradients,
    needs_plugin,
)

pytestmark = needs_plugin

ACTIVATIONS: dict[str, Function] = {
    "relu": flow.relu,
    "gelu": flow._C.gelu,
    "fast_gelu": flow._C.fast_gelu,
    "quick_gelu": flow._C.quick_gelu,
    "silu": flow._C.silu,
    "tanh": flow.tanh,
    "sigmoid": flow.sigmoid,
}


@pytest.mark.parametrize("name", ["relu", "gelu", "fast_gelu", "quick_gelu", "silu"])
def test_far_from_zero(name: str) -> None:
    """x itself on the right; 0 on the left, and no error that grows with x."""
    x = np.repeat(np.array([-1e6, -1e3, -200.0, 200.0, 1e3, 1e6], np.float32), 7)
    y, (dx,) = gradients(ACTIVATIONS[name], [x], np.ones_like(x))
    np.testing.assert_allclose(y, np.maximum(x, 0), rtol=3e-7, atol=1e-30)
    np.testing.assert_allclose(dx, x > 0, atol=3e-7)
