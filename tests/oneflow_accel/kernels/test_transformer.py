"""Rotary position embedding, RMS norm of a sum and SwiGLU: what records do not show."""

from __future__ import annotations

from oneflow_accel.kernels import registry
from oneflow_accel.kernels.optimizer import AdamW
from oneflow_accel.kernels.transformer import add_rms_norm, rms_norm, rope

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

    mine = gradients(add_rms_norm)
    with registry.disabled("add_rms_norm"):
        reference = gradients(add_rms_norm)
    for found, expected in zip(mine, reference, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_norms_of_shapes_that_do_not_fit() -> None:
    x, weight = flow.zeros(2, 4), flow.zeros(4)
    for wrong in (weight[:3], flow.zeros(1, 4)):
        with pytest.raises(ValueError, match="are not"):
            rms_norm(x, wrong, epsilon=1e-5)
    with pytest.raises(ValueError, match=r"a residual of \(4,\) is not of x's \(2, 4\)"):
        add_rms_norm(x, weight, weight, epsilon=1e-5)
    with pytest.raises(ValueError, match="dropout needs a seed"):
        add_rms_norm(x, x, weight, epsilon=1e-5, dropout=0.5)


@needs_plugin
@pytest.mark.parametrize("norm", ["rms_norm", "add_rms_norm"])
def test_a_norm_that_is_switched_off_is_the_same(norm: str) -> None:
    draw = np.random.default_rng(1)
    arrays = [draw.standard_normal(shape).astype(np.float32) for shape in ((3, 9, 20), (20,))]
    seed = flow.tensor([9], dtype=flow.int64)

    def outcome() -> list[np.ndarray]:
        x, weight = (flow.tensor(array, requires_grad=True) for array in arrays)
        if norm == "rms_norm":
            y = rms_norm(x, weight, epsilon=1e-5)
        else:
            y = add_rms_norm(x, x, weight, epsilon=1e-5, dropout=0.3, seed=seed)[0]
        (y * y * y).sum().backward()
        return [y.numpy(), x.grad.numpy(), weight.grad.numpy()]

    fused = outcome()
    with registry.disabled(norm):
        plain = outcome()
    for found, expected in zip(fused, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def _adamw(steps: int, **settings: float) -> list[np.ndarray]:
    """A float64 weight after each step, of algorithm 2 by Loshchilov and Hutter."""
    draw, weight = np.random.default_rng(2), np.linspace(-1, 1, 30)
    first = second = np.zeros(30)
    beta1, beta2, lr, found = 0.9, 0.95, settings["lr"], []
    for t in range(1, steps + 1):
        gradient = draw.standard_normal(30)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        change = first / (1 - beta1**t) / (np.sqrt(second / (1 - beta2**t)) + 1e-8)
        weight = weight - lr * change - lr * settings["weight_decay"] * weight
        found.append(weight)
    return found


@pytest.mark.parametrize("off", [(), ("adamw",)])
def test_adamw_in_one_pass_and_of_plain_operators(off: tuple[str, ...]) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1}
    weight = flow.nn.Parameter(flow.linspace(-1, 1, 30))
    optimizer = AdamW([weight], betas=(0.9, 0.95), eps=1e-8, **settings)
    draw = np.random.default_rng(2)
    with registry.disabled(*off):
        for expected in _adamw(6, **settings):
            weight.grad = flow.tensor(draw.standard_normal(30).astype(np.float32))
            optimizer.step()
            np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=2e-6)
