"""Optimizer steps and gradient clipping on the parameters of whole models."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from benchmarks.serve import Maker, Step
from benchmarks.shapes import parameter_shapes


def _parameters(model: str) -> list[nn.Parameter]:
    parameters = [nn.Parameter(flow.randn(*shape)) for shape in parameter_shapes(model)]
    for parameter in parameters:
        parameter.grad = flow.randn(*parameter.shape)
    return parameters


def optimizer(optimizer: str, model: str) -> Step:
    parameters = _parameters(model)
    if optimizer == "SGD":
        return flow.optim.SGD(parameters, lr=1e-6, momentum=0.9, weight_decay=1e-4).step
    return flow.optim.AdamW(parameters, lr=1e-6, weight_decay=0.01).step


def clip(model: str) -> Step:
    parameters = _parameters(model)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


MAKERS: dict[str, Maker] = {"optimizer": optimizer, "clip": clip}
