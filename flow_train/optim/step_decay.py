"""Learning rate schedules."""

from __future__ import annotations

# The schedule ResNets are trained with on ImageNet: epochs between steps, and what a step does.
DECAY_EVERY = 30
DECAY_FACTOR = 0.1


def step_decay(
    base_lr: float, epoch: int, every: int = DECAY_EVERY, factor: float = DECAY_FACTOR
) -> float:
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
