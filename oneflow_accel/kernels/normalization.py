"""Batch normalization of bfloat16 with float32 parameters and statistics."""

from __future__ import annotations

from oneflow_accel.kernels.operators import Operator

import oneflow as flow

_INPUTS = ("x", "moving_mean", "moving_variance", "gamma", "beta")
_TYPES = {"axis": "int32", "epsilon": "float", "momentum": "float", "training": "bool"}
# OneFlow's own operator, with its gradient. It takes them so; its function flow._C.normalization
# makes bfloat16 of the parameters and of the running statistics first.
_training = Operator("normalization", _INPUTS, ("y", "mean", "inv_variance"), _TYPES)
_evaluation = Operator("normalization", _INPUTS, ("y",), _TYPES)


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
    operator = _training if is_training else _evaluation
    tensors = (x, running_mean, running_var, weight, bias)
    settings = {"axis": axis, "epsilon": epsilon, "momentum": 1 - momentum}
    return operator(*tensors, **settings, training=is_training)[0]
