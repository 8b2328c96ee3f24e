"""A run that is resumed: its model, and checkpoints that older versions of main.py have written."""

from __future__ import annotations

import dataclasses
import logging

from oneflow_accel import layouts
from oneflow_accel.errors import CheckpointError

from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, step_of
from flow_train.optim.ema import averages_in

logger = logging.getLogger("oneflow_accel")


def restore_model(model: nn.Module, checkpoint: Checkpoint, arch: str, num_classes: int) -> None:
    """Load a checkpoint's parameters and buffers into a model, in whichever layout it is.

    Raises:
        CheckpointError: the checkpoint is of another architecture or number of classes; names both.
    """
    theirs = (checkpoint.name, checkpoint.state.get("num_classes"))
    if theirs != (arch, num_classes):
        raise CheckpointError(
            f"the checkpoint is of another model: {theirs[0]} with {theirs[1]} classes, this run "
            f"is {arch} with {num_classes}"
        )
    layouts.load_standard_state_dict(model, checkpoint.model, strict=True)


def up_to_date(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint in today's form. Before main.py had hooks, accumulation and loss scaling it kept
    of these the best accuracy alone."""
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
    """With the moving averages as weights, where its run had any: they are what it validated."""
    averages = averages_in(checkpoint.optimizer)
    if averages:
        logger.info("of the checkpoint's weights, their moving averages are evaluated")
    return dataclasses.replace(checkpoint, model={**checkpoint.model, **averages})
