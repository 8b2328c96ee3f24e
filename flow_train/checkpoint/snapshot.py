"""What a checkpoint of a run holds, and how a run goes on from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from oneflow_accel import distributed, layouts

import numpy as np

from flow_train.checkpoint.folders import Checkpoint
from flow_train.checkpoint.optimizer_state import by_parameter
from flow_train.hooks import Hook
from flow_train.options import Calendar, Position
from flow_train.rng import get_rng_state, set_rng_state
from flow_train.steps.eager import TrainStep, broadcast_buffers

logger = logging.getLogger("oneflow_accel")


def take(
    step: TrainStep, hooks: Mapping[str, Hook], state: Mapping[str, Any], *, name: str
) -> Checkpoint:
    """The run of a model of that name as it stands; `state` is what the loop knows of it. A
    collective call."""
    if step.layout is not None:
        # Each process writes what is not cut, and goes on with process 0's.
        broadcast_buffers(step.model)
    model: dict[str, np.ndarray] = {}
    arrays: dict[str, np.ndarray] = {}
    # A process that writes nothing copies nothing, unless the others need it for that.
    is_global = any(value.is_global for value in step.model.parameters())
    if distributed.is_main() or step.layout is not None or is_global:
        tensors = layouts.standard_state_dict(step.model)
        model = {name: value.numpy() for name, value in tensors.items()}
        arrays = step.optimizer_arrays()
    for hook in hooks.values():
        arrays |= hook.arrays()
    if step.layout is None:
        arrays = by_parameter(layouts.standard_array, arrays, step.model)
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
