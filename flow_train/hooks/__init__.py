"""What watches a run and keeps its results, each switched on by its key in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flow_train.config import keys
from flow_train.config.schema import read
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

# The order of the hooks matters: an average follows each update, what others know by the end of an
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
    """The hooks that a configuration switches on, by the keys of `keys.Callbacks`; null is off.
    UserError for an unknown key or option, or a wrong value."""
    options = read(keys.Callbacks, config, "callbacks").model_dump()
    return {
        key: make(**options[key]) for key, make in _CALLBACKS.items() if options[key] is not None
    }
