"""One training step of a classifier, eager or in nn.Graph: what tests compare."""

from __future__ import annotations

from collections.abc import Callable

import oneflow as flow
from oneflow import nn

Step = Callable[[flow.Tensor, flow.Tensor], flow.Tensor]


def eager_step(model: nn.Module, optimizer: flow.optim.Optimizer) -> Step:
    def step(images: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def graph_step(model: nn.Module, optimizer: flow.optim.Optimizer) -> nn.Graph:
    class Step(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, images: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
            loss = nn.functional.cross_entropy(self.model(images), labels)
            loss.backward()
            return loss

    return Step()
