"""Batch normalization of bfloat16 with float32 parameters and statistics."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels.operators import Operator, differentiable

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


def _evaluation_backward(kept: Any, y_grad: flow.Tensor, axis: int, epsilon: float) -> Any:
    """OneFlow's own gradient of x is float32, which a convolution in bfloat16 before it refuses."""
    x, mean, variance, gamma = kept
    inv_std = flow.rsqrt(variance + epsilon)
    how = {"axis": axis, "epsilon": epsilon}
    _, gamma_grad, beta_grad = _gradient(y_grad, x, mean, inv_std, gamma, **how)
    # flow.zeros_like warns in a graph.
    zeros = mean - mean
    as_x = y_grad, zeros, variance, gamma, zeros
    (x_grad,) = _evaluation(*as_x, **how, momentum=1.0, training=False)
    return x_grad, None, None, gamma_grad, beta_grad


@differentiable("batch_norm_evaluation", _evaluation_backward, autocast=None)
def _evaluated(*tensors: flow.Tensor, **how: Any) -> Any:
    return _evaluation(*tensors, **how, momentum=1.0, training=False)[0], tensors[:-1]


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
    how = {"axis": axis, "epsilon": epsilon}
    if not is_training:
        return _evaluated(*tensors, **how)
    return _training(*tensors, **how, momentum=1 - momentum, training=True)[0]
