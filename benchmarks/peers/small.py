"""Operations that are over before they are worth a second thread: what PyTorch itself takes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.serve import Maker, Step


def chain(operations: int, numbers: int) -> Step:
    x = torch.ones(numbers)

    def step() -> None:
        y = x
        for _ in range(operations):
            y = y + 1.0
        y[0].item()

    return step


def mlp_train(batch: int, inner: int, hidden: int, outer: int) -> Step:
    model = nn.Sequential(nn.Linear(inner, hidden), nn.ReLU(), nn.Linear(hidden, outer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, labels = torch.randn(batch, inner), torch.randint(0, outer, (batch,))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


MAKERS: dict[str, Maker] = {"chain": chain, "mlp_train": mlp_train}
