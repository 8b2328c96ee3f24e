"""Resumes a run: restores its model and reads checkpoints of older versions of main.py."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from oneflow_accel import layouts
from oneflow_accel.errors import CheckpointError

from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, require_model, step_of
from flow_train.optim import averages_in

logger = logging.getLogger("oneflow_accel")


def restore_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    arch: str,
    num_classes: int,
    classes: Sequence[str] = (),
) -> None:
    """Load a checkpoint's parameters and buffers into a model, in whichever layout it is.

    Class names are not compared where the run or the checkpoint has none. Raises CheckpointError,
    naming both sides, for another architecture, number of classes or class list.
    """
    require_model(checkpoint, arch, num_classes)
    named = zip(checkpoint.state.get("classes", ()), classes, strict=False)
    for number, (before, now) in enumerate(named):
        if before != now:
            raise CheckpointError(
                f"the checkpoint is of other classes: class {number} is {before!r} there and "
                f"{now!r} in this data; give the data it was trained on, or begin a new run with "
                "--weights CHECKPOINT/model.safetensors --reset-head"
            )
    layouts.load_standard_state_dict(model, checkpoint.model, strict=True)


def up_to_date(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint in today's form: before main.py had hooks, accumulation and loss scaling, it
    kept only the best accuracy of these."""
    state = checkpoint.state
    if "callbacks" in state:
        return checkpoint
    kept = []
    if checkpoint.folder is not None:
        best = CheckpointManager(checkpoint.folder.parent).best()
        if best is not None:
            kept = [[state["best_acc1"], step_of(best)]]
    hooks = {"model_checkpoint": {"kept": kept}}
    more = {"accumulate": 1, "train_step": {}, "callbacks": hooks}
    return dataclasses.replace(checkpoint, state={**state, **more})


def averaged(checkpoint: Checkpoint) -> Checkpoint:
    """The moving averages as weights, where the run had any: they are what it validated."""
    averages = averages_in(checkpoint.optimizer)
    if averages:
        logger.info("of the checkpoint's weights, their moving averages are evaluated")
    return dataclasses.replace(checkpoint, model={**checkpoint.model, **averages})
