"""What training minimizes and how: parameter groups, optimizers, schedules, averages, losses."""

from __future__ import annotations

from monarch_flow.optim.ema import ExponentialMovingAverage
from monarch_flow.optim.loss import CrossEntropy, build_loss, hard_labels
from monarch_flow.optim.optimizers import build_optimizer
from monarch_flow.optim.param_groups import ParameterGroup, group_parameters
from monarch_flow.optim.schedule import Schedule, build_schedule

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
