"""Rotary position embedding, RMS norm of a sum and SwiGLU: what records do not show."""

from __future__ import annotations

from oneflow_accel.kernels.transformer import add_rms_norm, rope

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import needs_plugin


@pytest.mark.parametrize(
    ("shape", "table", "axis"),
    [((2, 3, 4), (3, 1), 1), ((2, 3, 5), (3, 2), 1), ((2, 3, 4), (3, 2), 2), ((4,), (1, 2), 0)],
)
def test_shapes_that_do_not_fit(shape: tuple, table: tuple, axis: int) -> None:
    with pytest.raises(ValueError, match="are not"):
        rope(flow.zeros(*shape), flow.zeros(*table), flow.zeros(*table), axis=axis)


@needs_plugin
@pytest.mark.parametrize("used", [0, 1])
def test_gradients_where_one_of_the_two_outputs_is_not_used(used: int) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal((5, 8)).astype(np.float32) for _ in range(2)]
    arrays.append(draw.standard_normal(8).astype(np.float32))

    def gradients(function: object) -> list[np.ndarray]:
        tensors = [flow.tensor(array, requires_grad=True) for array in arrays]
        function(*tensors, epsilon=1e-5)[used].square().sum().backward()
        return [np.zeros(8) if each.grad is None else each.grad.numpy() for each in tensors]

    for mine, expected in zip(
        gradients(add_rms_norm), gradients(add_rms_norm.reference), strict=True
    ):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
