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
    weight: flow.Tensor,
    gradient: flow.Tensor,
    first: flow.Tensor,
    second: flow.Tensor,
    *,
    op: Any,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    if weight.is_global:
        gradient = gradient.to_global(placement=weight.placement, sbp=weight.sbp)
    first.mul_(betas[0]).add_(gradient * (1 - betas[0]))
    second.mul_(betas[1]).add_(gradient * gradient * (1 - betas[1]))
    denominator = second.sqrt() / math.sqrt(corrections[1]) + eps
    weight.mul_(1 - lr * weight_decay)
    weight.sub_(first / denominator * (lr / corrections[0]))


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
def adam_update(
    weight: flow.Tensor,
    gradient: flow.Tensor,
    first: flow.Tensor,
    second: flow.Tensor,
    *,
    op: Any,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    """One pass over the four tensors."""
    flow._C.dispatch_adam_update(
        op,
        (weight, gradient, first, second),
        learning_rate=lr,
        bias_correction1=corrections[0],
        bias_correction2=corrections[1],
        weight_decay=weight_decay,
        beta1=betas[0],
        beta2=betas[1],
        epsilon=eps,
        do_bias_correction=True,
        amsgrad=False,
    )


class AdamW(flow.optim.AdamW):
    """OneFlow's AdamW whose step is the operation "adamw", so that it can be switched off. An
    nn.Graph has an update of its own, in one pass."""

    def _single_tensor_update(self, param_group: Any) -> None:
        if param_group["amsgrad"]:
            super()._single_tensor_update(param_group)
            return
        for weight in param_group.parameters:
            if weight.grad is None:
                continue
            state = self._state[weight]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = flow.zeros_like(weight)
            adamw(
                weight,
                weight.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                op=self._op_without_amsgrad,
                lr=param_group["lr"],
                betas=tuple(param_group["betas"]),
                eps=param_group["eps"],
                weight_decay=param_group["weight_decay"],
                corrections=(param_group["bias_correction1"], param_group["bias_correction2"]),
            )
