"""Operations that are over before they are worth a second thread: what the framework itself takes.

OneFlow and PyTorch have the same names for all of it.
"""

from __future__ import annotations

from typing import Any

from benchmarks.serve import Maker, Step


def makers(framework: Any) -> dict[str, Maker]:
    """By kind.

    Args:
        framework: `oneflow` or `torch`.
    """
    nn = framework.nn

    def chain(operations: int, numbers: int) -> Step:
        x = framework.ones(numbers)

        def step() -> None:
            y = x
            for _ in range(operations):
                y = y + 1.0
            y[0].item()

        return step

    def mlp_train(batch: int, inner: int, hidden: int, outer: int) -> Step:
        model = nn.Sequential(nn.Linear(inner, hidden), nn.ReLU(), nn.Linear(hidden, outer))
        optimizer = framework.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x, labels = framework.randn(batch, inner), framework.randint(0, outer, (batch,))

        def step() -> None:
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

        return step

    return {"chain": chain, "mlp_train": mlp_train}
