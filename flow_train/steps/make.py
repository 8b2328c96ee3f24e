"""Which kind of step a run takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from oneflow_accel.backends.base import Backend

import oneflow as flow
from oneflow import nn

from flow_train.options import TrainerOptions
from flow_train.position import Calendar, Position
from flow_train.steps.eager import EagerStep, Loss, TrainStep
from flow_train.steps.graph import GraphStep

MakeStep = Callable[[nn.Module, Position], TrainStep]


def step_maker(
    backend: Backend,
    options: TrainerOptions,
    calendar: Calendar,
    make_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
    make_loss: Callable[[], Loss],
) -> MakeStep:
    """How to train a model from a position on, as `options` say: eagerly or under nn.Graph, which
    is compiled with the calendar's learning rates. The loss is the mean over a batch. The function
    that this gives raises UserError where the device cannot do what is asked for."""
    settings: dict[str, Any] = {"clip": options.clip, "precision": options.precision}

    def make(model: nn.Module, position: Position) -> TrainStep:
        if not options.graph:
            return EagerStep(model, backend, make_optimizer(model), make_loss(), **settings)
        begin = dataclasses.replace(position)
        return GraphStep(
            model,
            backend,
            make_optimizer,
            make_loss(),
            learning_rate=lambda step: calendar.learning_rate(max(step, begin.step), begin),
            steps=calendar.last_step(begin),
            accumulate=options.accumulate,
            **settings,
        )

    return make
