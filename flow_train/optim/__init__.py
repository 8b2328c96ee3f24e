"""What training minimizes and how: parameter groups, optimizers, schedules, averages, losses."""

from __future__ import annotations

from flow_train.optim.ema import ExponentialMovingAverage
from flow_train.optim.loss import CrossEntropy, build_loss, hard_labels
from flow_train.optim.optimizers import build_optimizer
from flow_train.optim.param_groups import ParameterGroup, group_parameters
from flow_train.optim.schedule import Schedule, build_schedule

__all__ = [
    "CrossEntropy",
    "ExponentialMovingAverage",
    "ParameterGroup",
    "Schedule",
    "build_loss",
    "build_optimizer",
    "build_schedule",
    "group_parameters",
    "hard_labels",
]
