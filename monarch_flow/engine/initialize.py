"""Starting from the weights of another run: as they are, or projected onto structured layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from oneflow_accel import layouts
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
from oneflow import nn

from flow_train.checkpoint.folders import read_checkpoint
from flow_train.checkpoint.weights import read_weights
from flow_train.optim.ema import averages_in
from monarch_flow.engine import other_weights
from monarch_flow.projection import structured_layers
from monarch_flow.projection.structures import LayerSpec, structure_of
from monarch_flow.projection.weights import split_packed_projection

logger = logging.getLogger("oneflow_accel")


def read_model_arrays(
    path: str | Path, *, use_ema: bool = True
) -> tuple[dict[str, np.ndarray], str | None]:
    """The weights in a checkpoint or file, and what the layers in it are.

    `use_ema` takes the moving average where there is one, as that is what was validated. The second
    result is a checkpoint's phase (`restore.MONARCH` or `DENSE`), None for a file. Raises UserError
    where there is nothing, or it cannot be read.
    """
    path = Path(path)
    if path.is_file() and path.name not in ("latest", "best"):
        return read_weights(path, averaged=use_ema), None
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / "best").is_file():
        path = path / "best"
    checkpoint = read_checkpoint(path)
    averages = averages_in(checkpoint.optimizer) if use_ema else {}
    arrays = {**checkpoint.model, **averages}
    logger.info("weights of %s%s", path, ", their moving average" if averages else "")
    return arrays, checkpoint.state.get("phase")


def initialize(
    model: nn.Module,
    path: str | Path,
    *,
    project: bool,
    use_ema: bool = True,
    reset_head: bool = False,
) -> None:
    """Give a local model, in training's first state, the weights of another one.

    Args:
        project: each structured layer gets the nearest matrix it can represent to the source's
            dense weight (Dao et al. 2022, "Monarch", section 3.3).
        reset_head: leave the classifier as it was drawn, for other classes.

    Raises:
        CheckpointError: the weights do not fit; names them.
        UserError: they cannot be read, or there is no layer to project onto.
    """
    layers = structured_layers(model)
    if project and not layers:
        raise UserError(
            "train.init_from.project: the model has no structured layer to project onto; choose "
            "one with model.mlp_cfg, or leave project out"
        )
    arrays, _ = read_model_arrays(path, use_ema=use_ema)
    try:
        arrays = other_weights.with_our_names(arrays, model)
        if reset_head:
            arrays = other_weights.with_new_head(arrays, model)
        if project:
            arrays = _projected(arrays, model, layers)
        layouts.load_standard_state_dict(model, arrays, strict=True)
    except UserError as error:
        hint = other_weights.hint(
            arrays,
            model,
            for_head="train.init_from.reset_head=true begins with a new head",
            for_dense="" if project else "train.init_from.project=true projects them",
        )
        raise CheckpointError(f"train.init_from.path={path}: {error}{hint}") from error


def _projected(
    arrays: Mapping[str, np.ndarray], model: nn.Module, layers: Mapping[str, LayerSpec]
) -> dict[str, np.ndarray]:
    own = {name: value.numpy() for name, value in layouts.standard_state_dict(model).items()}
    result = dict(_unpacked(arrays, layers))
    for prefix, spec in layers.items():
        weight = result.pop(f"{prefix}.weight", None)
        if weight is None:
            raise UserError(f"there is no dense weight {prefix}.weight to project")
        if weight.shape != (spec.out_features, spec.in_features):
            raise UserError(
                f"{prefix}.weight has shape {weight.shape}, the layer is "
                f"{spec.out_features} x {spec.in_features}"
            )
        inside = {
            name.removeprefix(f"{prefix}."): array
            for name, array in own.items()
            if name.startswith(f"{prefix}.")
        }
        projected = {**inside, **structure_of(spec).project(weight, inside)}
        # The dense layer's own bias stays; one that it does not have is 0.
        projected.pop("bias", None)
        result |= {f"{prefix}.{name}": array for name, array in projected.items()}
        if "bias" in inside:
            result.setdefault(f"{prefix}.bias", np.zeros_like(inside["bias"]))
    logger.info("projected %d dense layers onto structured ones", len(layers))
    return result


def _unpacked(
    arrays: Mapping[str, np.ndarray], layers: Mapping[str, LayerSpec]
) -> dict[str, np.ndarray]:
    """Split packed projections where the model has three."""
    result: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        parts = split_packed_projection(name, array)
        has_parts = next(iter(parts)).rpartition(".")[0] in layers
        result |= parts if has_parts else {name: array}
    return result
