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
    decay = max(decay_iters - warmup_iters, 1)
    cosine = flow.optim.lr_scheduler.CosineDecayLR(optimizer, decay_steps=decay, alpha=alpha)
    if warmup_iters < 2:
        return cosine
    # The step before the cosine's first has the whole rate already.
    return flow.optim.lr_scheduler.WarmUpLR(
        cosine,
        warmup_factor=1 / warmup_iters,
        warmup_iters=warmup_iters - 1,
        warmup_method="linear",
        warmup_prefix=True,
    )
