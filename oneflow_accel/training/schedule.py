"""Learning rate schedules."""

from __future__ import annotations


def step_decay(base_lr: float, epoch: int, every: int = 30, factor: float = 0.1) -> float:
    """Learning rate of an epoch: `base_lr * factor ** (epoch // every)`.

    Args:
        base_lr: learning rate of the first epoch.
        epoch: counted from 0.
        every: number of epochs between two decays.
        factor: what each decay multiplies by.

    Raises:
        ValueError: `epoch` is negative or `every` is not positive.
    """
    if epoch < 0 or every < 1:
        raise ValueError(f"epoch must be >= 0 and every >= 1, got {epoch} and {every}")
    return base_lr * factor ** (epoch // every)
