"""Learning rates over a run: constant, linear or cosine, each with a linear warm-up; and the steps
that ResNets are trained with.

A schedule is a function of the time t, in epochs or in optimizer steps as its configuration says.
It keeps no state, so a resumed run needs none of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flow_train.config import keys
from flow_train.config.schema import read


@dataclass(frozen=True)
class CosineSchedule:
    """Cosine annealing (Loshchilov and Hutter 2017, "SGDR", equation 5) after a linear warm-up.

    The meaning of every key is that of timm's CosineLRScheduler. Two things are easily taken for
    errors: without `warmup_prefix` the cosine's phase counts from t = 0 and not from the end of the
    warm-up, so that the learning rate jumps there; and after the last cycle it stays at `lr_min`.

    Attributes:
        base_lr: learning rate at the top of the first cosine.
        t_initial: length of the first cycle.
        lr_min: learning rate at the bottom.
        warmup_t: length of the warm-up; 0 for none.
        warmup_lr_init: learning rate at t = 0, where there is a warm-up.
        warmup_prefix: the cosine begins when the warm-up ends.
        cycle_mul: how much longer each cycle is than the one before.
        cycle_decay: how much lower each cycle's top is.
        cycle_limit: number of cycles.
        k_decay: exponent on the phase (arXiv 2004.05909); 1 is the plain cosine.
        cooldown: time at `lr_min` after the last cycle. It only says how long the run is.
    """

    base_lr: float
    t_initial: float
    lr_min: float
    warmup_t: float
    warmup_lr_init: float
    warmup_prefix: bool
    cycle_mul: float
    cycle_decay: float
    cycle_limit: int
    k_decay: float
    cooldown: float

    def __call__(self, t: float) -> float:
        if t < self.warmup_t:
            return _warmup(t, self.warmup_t, self.warmup_lr_init, self.base_lr)
        if self.warmup_prefix:
            t -= self.warmup_t
        cycle, position, length = self._cycle(t)
        if cycle >= self.cycle_limit:
            return self.lr_min
        phase = (position / length) ** self.k_decay
        top = self.base_lr * self.cycle_decay**cycle
        return self.lr_min + 0.5 * (top - self.lr_min) * (1 + math.cos(math.pi * phase))

    @property
    def length(self) -> float:
        """Time until the run is over: warm-up (if a prefix), all cycles, cooldown."""
        if self.cycle_mul == 1:
            cycles = self.t_initial * self.cycle_limit
        else:
            growth = (self.cycle_mul**self.cycle_limit - 1) / (self.cycle_mul - 1)
            cycles = math.floor(self.t_initial * growth)
        return cycles + (self.warmup_t if self.warmup_prefix else 0) + self.cooldown

    def _cycle(self, t: float) -> tuple[int, float, float]:
        """Number of the cycle that t is in, time since its beginning, its length."""
        cycle, begin, length = 0, 0.0, float(self.t_initial)
        if self.cycle_mul == 1:
            cycle = int(t // length)
            return cycle, t - cycle * length, length
        # Beyond the last cycle nothing depends on which cycle it would be.
        while t >= begin + length and cycle < self.cycle_limit:
            begin += length
            length *= self.cycle_mul
            cycle += 1
        return cycle, t - begin, length


@dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up from `warmup_lr_init`, then a straight line down that reaches `lr_min` at
    `t_total`, warm-up included, and stays there."""

    base_lr: float
    t_total: float
    warmup_t: float
    warmup_lr_init: float
    lr_min: float

    def __call__(self, t: float) -> float:
        if t < self.warmup_t:
            return _warmup(t, self.warmup_t, self.warmup_lr_init, self.base_lr)
        left = max(0.0, (self.t_total - t) / (self.t_total - self.warmup_t))
        return self.lr_min + (self.base_lr - self.lr_min) * left

    @property
    def length(self) -> float:
        return self.t_total


@dataclass(frozen=True)
class ConstantSchedule:
    """One learning rate after a linear warm-up from `warmup_lr_init` (`warmup_t` 0: none)."""

    base_lr: float
    warmup_t: float = 0
    warmup_lr_init: float = 0.0

    def __call__(self, t: float) -> float:
        if t < self.warmup_t:
            return _warmup(t, self.warmup_t, self.warmup_lr_init, self.base_lr)
        return self.base_lr

    @property
    def length(self) -> float:
        return math.inf


Schedule = CosineSchedule | LinearSchedule | ConstantSchedule

_KINDS: dict[str, type[Schedule]] = {
    "cosine": CosineSchedule,
    "linear": LinearSchedule,
    "constant": ConstantSchedule,
}


def build_schedule(config: Mapping[str, Any] | None, base_lr: float) -> Schedule:
    """The schedule that `keys.Scheduler` describes; None is a constant learning rate. `base_lr` is
    the optimizer's. UserError for an unknown name or key, a missing one, or a value of the wrong
    type or range."""
    if config is None:
        return ConstantSchedule(base_lr)
    options = read(keys.Scheduler, config, "scheduler")
    kind = _KINDS[options.name]
    names = [field.name for field in fields(kind) if field.name != "base_lr"]
    return kind(base_lr, **{name: getattr(options, name) for name in names})


def _warmup(t: float, length: float, begin: float, end: float) -> float:
    return begin + t * (end - begin) / length


# The schedule ResNets are trained with on ImageNet: epochs between steps, and what a step does.
DECAY_EVERY = 30
DECAY_FACTOR = 0.1


def step_decay(
    base_lr: float, epoch: int, every: int = DECAY_EVERY, factor: float = DECAY_FACTOR
) -> float:
    """Learning rate of an epoch, counted from 0: `base_lr * factor ** (epoch // every)`. ValueError
    if `epoch` is negative or `every` is not positive."""
    if epoch < 0 or every < 1:
        raise ValueError(f"epoch must be >= 0 and every >= 1, got {epoch} and {every}")
    return base_lr * factor ** (epoch // every)
