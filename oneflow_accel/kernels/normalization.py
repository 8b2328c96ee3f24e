"""Batch normalization of bfloat16 with float32 parameters and statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from oneflow_accel.kernels.operators import Operator, differentiable, needs_gradient

import oneflow as flow

_INPUTS = ("x", "moving_mean", "moving_variance", "gamma", "beta")
_TYPES = {"axis": "int32", "epsilon": "float", "momentum": "float", "training": "bool"}
# OneFlow's own operator, with its gradient. It takes them so; its function flow._C.normalization
# makes bfloat16 of the parameters and of the running statistics first.
_training = Operator("normalization", _INPUTS, ("y", "mean", "inv_variance"), _TYPES)
_evaluation = Operator("normalization", _INPUTS, ("y",), _TYPES)
_gradient = Operator(
    "normalization_grad",
    ("dy", "x", "mean", "inv_variance", "gamma"),
    ("dx", "gamma_diff", "beta_diff"),
    {"axis": "int32", "epsilon": "float"},
)


@lru_cache(maxsize=16)
def _evaluation_with_gradient(axis: int, epsilon: float) -> Callable[..., flow.Tensor]:
    """OneFlow's own gradient of x is float32, which a convolution in bfloat16 before it refuses."""
    settings = {"axis": axis, "epsilon": epsilon}

    def normalized(x: flow.Tensor, *tensors: flow.Tensor) -> flow.Tensor:
        return _evaluation(x, *tensors, **settings, momentum=1.0, training=False)[0]

    def run(ctx: Any, *tensors: flow.Tensor) -> flow.Tensor:
        ctx.save_for_backward(*tensors[:-1])
        return normalized(*tensors)

    def gradients(ctx: Any, y_grad: flow.Tensor) -> Any:
        x, mean, variance, gamma = ctx.saved_tensors
        inv_std = flow.rsqrt(variance + epsilon)
        _, gamma_grad, beta_grad = _gradient(y_grad, x, mean, inv_std, gamma, **settings)
        # flow.zeros_like warns in a graph.
        zeros = mean - mean
        return normalized(y_grad, zeros, variance, gamma, zeros), None, None, gamma_grad, beta_grad

    return differentiable("batch_norm_evaluation", run, gradients, autocast=None)


def batch_norm(
    x: flow.Tensor,
    running_mean: flow.Tensor,
    running_var: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor,
    *,
    axis: int,
    epsilon: float,
    momentum: float,
    is_training: bool,
) -> flow.Tensor:
    """x bfloat16, (C,) float32 at `axis`; bfloat16 as x. In training the running statistics move by
    `momentum` towards the batch's, as in nn.BatchNorm2d. Called by OneFlow's batch norms, by way of
    patches/oneflow-0.9.0/0006."""
    tensors = (x, running_mean, running_var, weight, bias)
    if not is_training and needs_gradient(x, weight, bias):
        return _evaluation_with_gradient(axis, epsilon)(*tensors)
    operator = _training if is_training else _evaluation
    settings = {"axis": axis, "epsilon": epsilon, "momentum": 1 - momentum}
    return operator(*tensors, **settings, training=is_training)[0]
