"""Dropout with the caller's mask and bias or causal softmax (split: test_parallel_layouts.py)."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.kernels import plugin
from oneflow_accel.kernels.attention import (
    causal_softmax,
    causal_softmax_mask_scale,
    fused_causal_softmax_mask_scale,
)
from oneflow_accel.kernels.linear import bias_mask_scale, fused_bias_mask_scale

import numpy as np
import oneflow as flow
import pytest

from tests.tolerances import assert_close

RNG = np.random.default_rng(4)
needs_plugin = pytest.mark.skipif(not plugin.state().loaded, reason="no CPU plug-in")
FORMS = ["reference", pytest.param("fused", marks=needs_plugin), "chosen"]


def _softmax(scores: np.ndarray, scale: float) -> np.ndarray:
    rows, columns = scores.shape[-2:]
    seen = np.tril(np.ones((rows, columns), dtype=bool), columns - rows)
    odds = np.where(seen, np.exp(scale * (scores - scores.max())), 0)
    return odds / odds.sum(-1, keepdims=True)


def _tensor(values: np.ndarray) -> flow.Tensor:
    return flow.tensor(values, dtype=flow.float32, requires_grad=True)


def _form(form: str, operation: Callable[..., flow.Tensor], fused: Callable[..., flow.Tensor]):
    return {"reference": operation.reference, "fused": fused, "chosen": operation}[form]


@pytest.mark.parametrize("form", FORMS)
def test_bias_mask_scale(form: str) -> None:
    x, bias, grad = (RNG.standard_normal(size) for size in [(3, 5, 8), (8,), (3, 5, 8)])
    keep = RNG.random(x.shape) > 0.3
    run = _form(form, bias_mask_scale, fused_bias_mask_scale)
    inputs = _tensor(x), _tensor(bias)
    y = run(*inputs, flow.tensor(keep), 1.25)
    assert_close(y.numpy(), (x + bias) * keep * 1.25)
    y.backward(flow.tensor(grad, dtype=flow.float32))
    assert_close(inputs[0].grad.numpy(), grad * keep * 1.25)
    assert_close(inputs[1].grad.numpy(), (grad * keep * 1.25).sum((0, 1)), reduced=15)


@needs_plugin
def test_bias_mask_scale_in_bfloat16() -> None:
    x, bias = (flow.tensor(RNG.standard_normal(size)).bfloat16() for size in [(3, 5, 8), (8,)])
    keep = flow.tensor(RNG.random(x.shape) > 0.3)
    y = fused_bias_mask_scale(x, bias, keep, 1.25)
    assert y.dtype == flow.bfloat16
    exact = (x.float() + bias.float()) * keep * 1.25
    np.testing.assert_array_equal(y.float().numpy(), exact.bfloat16().float().numpy())
    with pytest.raises(RuntimeError, match="another dtype"):
        fused_bias_mask_scale(x, bias.float(), keep, 1.25).numpy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 7, 7), (1, 2, 3, 9)])
def test_causal_softmax_mask_scale(form: str, shape: tuple[int, ...]) -> None:
    scores, grad = RNG.standard_normal(shape), RNG.standard_normal(shape)
    keep = RNG.random(shape) > 0.3
    run = _form(form, causal_softmax_mask_scale, fused_causal_softmax_mask_scale)
    x = _tensor(scores)
    y = run(x, flow.tensor(keep), 0.5, 1.25)
    weights = _softmax(scores, 0.5)
    assert_close(y.numpy(), weights * keep * 1.25)
    y.backward(flow.tensor(grad, dtype=flow.float32))
    inner = grad * keep * 1.25
    expected = 0.5 * weights * (inner - (inner * weights).sum(-1, keepdims=True))
    assert_close(x.grad.numpy(), expected, reduced=shape[-1])


def test_causal_softmax_of_plain_operators() -> None:
    scores = RNG.standard_normal((2, 4, 4))
    assert_close(causal_softmax(_tensor(scores), 2.0).detach().numpy(), _softmax(scores, 2.0))
