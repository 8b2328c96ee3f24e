"""The update of AdamW as an operation, and OneFlow's AdamW with it."""

from __future__ import annotations

import math
from typing import Any

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow


def _reference(
    *tensors: flow.Tensor,
    op: Any,
    learning_rate: float,
    bias_correction1: float,
    bias_correction2: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    weight, gradient, first, second = tensors
    if weight.is_global:
        gradient = gradient.to_global(placement=weight.placement, sbp=weight.sbp)
    first.mul_(beta1).add_(gradient * (1 - beta1))
    second.mul_(beta2).add_(gradient * gradient * (1 - beta2))
    denominator = second.sqrt() / math.sqrt(bias_correction2) + epsilon
    weight.mul_(1 - learning_rate * weight_decay)
    weight.sub_(first / denominator * (learning_rate / bias_correction1))


adamw = register_operation(
    "adamw",
    reference=_reference,
    doc="AdamW's step (Loshchilov and Hutter 2019, algorithm 2) of weight, first and second moment "
    "in place",
)


# OneFlow has a kernel of it on every device; `op` is its operator.
@implementation(
    "adamw", backend=MluBackend.name, dtypes=(flow.float32, flow.float16), never_run=True
)
@implementation(
    "adamw",
    backend=CudaBackend.name,
    dtypes=(flow.float32, flow.float64, flow.float16),
    never_run=True,
)
@implementation("adamw", backend=CpuBackend.name, dtypes=(flow.float32, flow.float64))
def adam_update(*tensors: flow.Tensor, op: Any, **numbers: float) -> None:
    """One pass over weight, gradient, first and second moment."""
    how = {"do_bias_correction": True, "amsgrad": False}
    flow._C.dispatch_adam_update(op, tensors, **numbers, **how)


class AdamW(flow.optim.AdamW):
    """OneFlow's AdamW whose step is the operation "adamw", so that it can be switched off. An
    nn.Graph has an update of its own, in one pass."""

    def _single_tensor_update(self, param_group: Any) -> None:
        if param_group["amsgrad"]:
            super()._single_tensor_update(param_group)
            return
        beta1, beta2 = param_group["betas"]
        for weight in param_group.parameters:
            if weight.grad is None:
                continue
            state = self._state[weight]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = flow.zeros_like(weight)
            adamw(
                *(weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]),
                op=self._op_without_amsgrad,
                learning_rate=param_group["lr"],
                bias_correction1=param_group["bias_correction1"],
                bias_correction2=param_group["bias_correction2"],
                weight_decay=param_group["weight_decay"],
                beta1=beta1,
                beta2=beta2,
                epsilon=param_group["eps"],
            )
