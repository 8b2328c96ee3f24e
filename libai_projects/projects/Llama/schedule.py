"""The learning rate of pretrain.py."""

from __future__ import annotations

from typing import Any

import oneflow as flow


def warmup_cosine(
    optimizer: flow.optim.Optimizer,
    *,
    warmup_iters: int,
    decay_iters: int,
    alpha: float,
    max_iter: int,
    warmup_iter: int,
) -> Any:
    """Linear from 1 / warmup_iters of the rate to all of it, then a cosine to `alpha` of it at step
    `decay_iters`, and that rate from there on (nanoGPT's schedule). The trainer fills in `max_iter`
    and `warmup_iter`, which other schedules go by."""
    rates = flow.optim.lr_scheduler
    decay = max(decay_iters - warmup_iters, 1)
    cosine = rates.CosineDecayLR(optimizer, decay_steps=decay, alpha=alpha)
    if warmup_iters < 1:
        return cosine
    # Not WarmUpLR: the last step of the warm-up has the whole rate, and so has the cosine's first.
    linear = rates.LinearLR(
        optimizer, start_factor=1 / warmup_iters, total_iters=max(warmup_iters - 1, 1)
    )
    return rates.SequentialLR(
        optimizer, [linear, cosine], milestones=[warmup_iters], interval_rescaling=True
    )
