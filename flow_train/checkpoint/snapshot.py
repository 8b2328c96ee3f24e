"""What a checkpoint of a run holds, and how a run goes on from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from oneflow_accel import distributed, layouts

from flow_train.checkpoint.folders import Checkpoint
from flow_train.checkpoint.optimizer_state import by_parameter
from flow_train.hooks import Hook
from flow_train.options import Calendar, Position
from flow_train.rng import get_rng_state, set_rng_state
from flow_train.steps.eager import TrainStep

logger = logging.getLogger("oneflow_accel")


def take(
    step: TrainStep, hooks: Mapping[str, Hook], state: Mapping[str, Any], *, name: str
) -> Checkpoint:
    """The run of a model of that name as it stands; `state` is what the loop knows of it. A
    collective call."""
    model, arrays = step.arrays()
    of_hooks = {name: array for hook in hooks.values() for name, array in hook.arrays().items()}
    if of_hooks:
        if step.layout is None:
            of_hooks = by_parameter(layouts.standard_array, of_hooks, step.model)
        arrays = {**arrays, **of_hooks}
    state = {
        **state,
        "rng": distributed.all_gather_json(get_rng_state()),
        "train_step": step.state(),
        "callbacks": {key: value.state() for key, value in hooks.items()},
    }
    return Checkpoint(model, arrays, state, name=name, layout=step.layout)


def position_of(
    checkpoint: Checkpoint, calendar: Calendar, global_batch_size: int, accumulate: int
) -> Position:
    """Where a run goes on. With another number of samples per step, of all processes, than before
    it is the nearest batch of the same epoch."""
    state = checkpoint.state
    position = Position(state["epoch"], state["batch"], state["step"])
    # A step may be made of other batches now, such as of smaller ones on more processes.
    steps = state["batch"] // state["accumulate"]
    before = state["global_batch_size"]
    if steps and before != global_batch_size:
        steps = steps * before // global_batch_size
        logger.warning(
            "a step is %d samples now and was %d: the epoch goes on at the nearest batch",
            global_batch_size,
            before,
        )
    position.batch = min(steps * accumulate, calendar.batches)
    return position


def load_step(step: TrainStep, checkpoint: Checkpoint, position: Position) -> None:
    """Restore the optimizer, and the random generators where the checkpoint has their state;
    CheckpointError if the optimizer's arrays are not those of this run."""
    state = checkpoint.state
    step.load_optimizer(step.own(checkpoint.optimizer), position.step)
    step.load_state(state["train_step"])
    # A process that was not there before goes on with the first one's state.
    rng, rank = state["rng"], distributed.rank()
    if rng:
        set_rng_state(rng[rank if rank < len(rng) else 0])
    logger.info("resumed at epoch %d, step %d", position.epoch, position.step)


def load_hooks(hooks: Mapping[str, Hook], checkpoint: Checkpoint, step: TrainStep) -> None:
    """Restore the hooks; one that was not on before, or is not in the file, begins afresh.
    CheckpointError if an array is missing."""
    states: Mapping[str, Any] = checkpoint.state["callbacks"]
    arrays = step.own(checkpoint.optimizer)
    for key, hook in hooks.items():
        if key in states:
            hook.load(states[key], arrays)
        elif hook.state():
            logger.warning("callbacks.%s has no past in the run resumed and begins now", key)
