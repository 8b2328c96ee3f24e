"""What the files of configs/ can compute with, as in `${mul:2,${datamodule.batch_size}}`.

hydra has no arithmetic, and eval() is not for configuration files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf

# What optimizer.lr is where it follows from train.lr_base.
SCALED_LR = "${scaled_lr:}"


def world_size() -> int:
    """Number of processes, as the launcher says: a configuration is composed without starting a
    job.

    Raises:
        UserError: WORLD_SIZE in the environment is no such number.
    """
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"WORLD_SIZE={value} in the environment is no number of processes")
    return int(value)


def register_resolvers() -> None:
    """Make the functions known to OmegaConf; again and again does no harm."""
    resolvers: dict[str, Callable[..., Any]] = {
        "required": _required,
        "div_up": _div_up,
        "mul": _mul,
        "add": _add,
        "world_size": world_size,
        "scaled_lr": _scaled_lr,
        "scaled_decay": _scaled_decay,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _required() -> None:
    raise ValueError("a value has to be given")


def _div_up(number: int, by: int) -> int:
    _whole("div_up", number, by)
    if by < 1:
        raise ValueError(f"div_up: {by} is no divisor")
    return -(-number // by)


def _mul(*numbers: int) -> int:
    _whole("mul", *numbers)
    product = 1
    for number in numbers:
        product *= number
    return product


def _add(*numbers: int) -> int:
    _whole("add", *numbers)
    return sum(numbers)


def _scaled_lr(*, _root_: DictConfig) -> float:
    """The learning rate of a step, in proportion to its images (Goyal et al. 2017, arXiv
    1706.02677, section 2.1): train.lr_base times the images over train.lr_base_size."""
    base = _root_.train.lr_base
    if base is None:
        raise ValueError("train.lr_base is null: give it, or optimizer.lr=VALUE")
    _number("train.lr_base", base)
    return base * _share(_root_)


def _scaled_decay(decay: float, *, _root_: DictConfig) -> float:
    """The decay of a moving average that forgets as much per image as one that has `decay` per
    train.lr_base_size images: `decay` to the power of the images of a step over that."""
    _number("scaled_decay", decay)
    if decay < 0:
        raise ValueError(f"scaled_decay: {decay} is below 0")
    return float(decay ** _share(_root_))


def _share(root: DictConfig) -> float:
    """Images of a step over the number that base values are for."""
    images, per = root.train.global_batch_size, root.train.lr_base_size
    _whole("train.global_batch_size", images)
    _whole("train.lr_base_size", per)
    if per < 1:
        raise ValueError(f"train.lr_base_size is {per}; it has to be 1 or more")
    return images / per


def _whole(name: str, *numbers: Any) -> None:
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{name} works on whole numbers, got {number!r}")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} works on numbers, got {value!r}")
