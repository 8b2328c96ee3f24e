"""Restores a resumed run's model, whose structured layers may have become dense."""

from __future__ import annotations

from collections.abc import Mapping

from oneflow_accel import layouts
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint
from flow_train.checkpoint.resume import require_model
from monarch_flow.engine import other_weights
from monarch_flow.projection import densify_model, structured_layers

# The phase of a checkpoint: its structured layers are as configured, or multiplied out.
MONARCH, DENSE = "monarch", "dense"
# The entries of a checkpoint's state that a resumed run needs.
_OF_A_RUN = ("epoch", "batch", "step", "seed", "rng", "train_step", "callbacks")


def phase_of(model: nn.Module) -> str:
    """MONARCH where a model has structured layers of any kind, else DENSE."""
    return MONARCH if structured_layers(model) else DENSE


def require_run(checkpoint: Checkpoint, where: str) -> None:
    """Raise CheckpointError where a checkpoint has weights but no place in a run; it says how to
    start from them. `where` is what the user asked for."""
    missing = [key for key in _OF_A_RUN if key not in checkpoint.state]
    if missing:
        raise CheckpointError(
            f"resume={where}: the checkpoint holds no run to go on with, such as one that "
            f"`monarch_flow.convert project` wrote (there is no {missing[0]}); start a run from "
            "its weights with train.init_from.path"
        )


def match_layers(model: nn.Module, arrays: Mapping[str, np.ndarray], phase: str | None) -> None:
    """Make a model's structured layers dense where the weights to load are.

    `phase` is what the checkpoint says, None where nothing does. The arrays win: a converted
    checkpoint may say otherwise.
    """
    own = model.state_dict()
    layers = structured_layers(model)
    names = [f"{prefix}.weight" for prefix in layers]
    # A masked layer's own weight is a matrix too, so it does not show that the source is dense.
    dense = [
        arrays[name].ndim == 2 and (name not in own or own[name].ndim != 2)
        for name in names
        if name in arrays
    ]
    if layers and (phase == DENSE or (len(dense) == len(layers) and all(dense))):
        densify_model(model)


def load_model(
    model: nn.Module, checkpoint: Checkpoint, name: str, num_classes: int, *, switches: bool
) -> None:
    """Load a checkpoint's weights; where they are dense already, the model becomes dense first.

    `switches` says whether the run makes its layers dense. Raises CheckpointError where the
    checkpoint is of another model, or dense where the run's layers stay structured.
    """
    require_model(checkpoint, name, num_classes)
    phase = checkpoint.state.get("phase")
    if phase == DENSE and structured_layers(model) and not (switches or _switched(checkpoint)):
        raise CheckpointError(
            "the checkpoint's layers are dense, and those of this run are structured: resume it "
            "with the experiment that it comes from, or begin with its weights projected, "
            "train.init_from.path=PATH train.init_from.project=true"
        )
    match_layers(model, checkpoint.model, phase)
    try:
        layouts.load_standard_state_dict(model, checkpoint.model, strict=True)
    except UserError as error:
        hint = other_weights.hint(
            checkpoint.model,
            model,
            for_head="train.init_from.reset_head=true begins with a new head",
            for_dense="train.init_from.project=true projects them",
        )
        raise CheckpointError(f"the checkpoint is of another model: {error}{hint}") from error


def _switched(checkpoint: Checkpoint) -> bool:
    train = (checkpoint.state.get("config") or {}).get("train") or {}
    return (train.get("sparse_to_dense") or {}).get("fraction") is not None
