"""What watches a run and keeps its results, each switched on by its key in the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from oneflow_accel.errors import UserError

from flow_train.hooks.base import Hook
from flow_train.hooks.early_stopping import EarlyStopping
from flow_train.hooks.ema import MovingAverage
from flow_train.hooks.initial_validation import InitialValidation
from flow_train.hooks.model_checkpoint import ModelCheckpoint
from flow_train.hooks.monitors import (
    LearningRateMonitor,
    MacsLog,
    NormMonitor,
    ParamsLog,
    SpeedMonitor,
)

__all__ = [
    "EarlyStopping",
    "Hook",
    "InitialValidation",
    "LearningRateMonitor",
    "MacsLog",
    "ModelCheckpoint",
    "MovingAverage",
    "NormMonitor",
    "ParamsLog",
    "SpeedMonitor",
    "build_hooks",
]

# In the order of their hooks: an average follows each update, what others know by the end of an
# epoch is in its checkpoint.
_CALLBACKS: dict[str, Callable[..., Hook]] = {
    "ema": MovingAverage,
    "params_log": ParamsLog,
    "macs": MacsLog,
    "initial_validation": InitialValidation,
    "learning_rate_monitor": LearningRateMonitor,
    "norm_monitor": NormMonitor,
    "speed_monitor": SpeedMonitor,
    "early_stopping": EarlyStopping,
    "model_checkpoint": ModelCheckpoint,
}


def build_hooks(config: Mapping[str, Any]) -> dict[str, Hook]:
    """The hooks that a configuration switches on, by key.

    Args:
        config: options by key; a key with null is off.

    Raises:
        UserError: an unknown key or option.
    """
    for key in config:
        if key not in _CALLBACKS:
            raise UserError(f"there is no callbacks.{key}; there are {', '.join(_CALLBACKS)}")
    return {
        key: _build(key, make, config[key])
        for key, make in _CALLBACKS.items()
        if config.get(key) is not None
    }


def _build(key: str, make: Callable[..., Hook], options: Mapping[str, Any]) -> Hook:
    arguments = {name: value for name, value in options.items() if name != "_target_"}
    known = inspect.signature(make).parameters
    for name in arguments:
        if name not in known:
            raise UserError(f"callbacks.{key} has no option {name}; it has {', '.join(known)}")
    missing = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and arguments.get(name) is None
    ]
    if missing:
        raise UserError(f"callbacks.{key}.{missing[0]} is missing")
    return make(**arguments)
