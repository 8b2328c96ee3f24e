"""Operations that are over before they are worth a second thread: what OneFlow itself takes."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from benchmarks.serve import Maker, Step


def chain(operations: int, numbers: int) -> Step:
    x = flow.ones(numbers)

    def step() -> None:
        y = x
        for _ in range(operations):
            y = y + 1.0
        y[0].item()

    return step


def mlp_train(batch: int, inner: int, hidden: int, outer: int) -> Step:
    model = nn.Sequential(nn.Linear(inner, hidden), nn.ReLU(), nn.Linear(hidden, outer))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, labels = flow.randn(batch, inner), flow.randint(0, outer, (batch,))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


MAKERS: dict[str, Maker] = {"chain": chain, "mlp_train": mlp_train}
