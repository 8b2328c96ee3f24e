"""Which weights a model gets: those of a resumed run, whose layers may have become dense, or of
another run, as they are or projected; under other names, for other classes or other layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from oneflow_accel import layouts
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint, read_checkpoint, require_model
from flow_train.checkpoint.weights import read_weights
from flow_train.optim import averages_in
from monarch_flow.models.t2t_vit import is_published_t2t, t2t_names
from monarch_flow.projection import densify_model, structured_layers
from monarch_flow.projection.state_dicts import split_packed_projection
from monarch_flow.projection.structures import LayerSpec, structure_of

# The prefix of the classifier's weights in all our models.
_HEAD = "head."
# A ViT's patch embedding; its first axis is the model's width.
_PATCHES = "patch_embed.proj.weight"
_POSITIONS = "pos_embed.pe"
# The phase of a checkpoint: its structured layers are as configured, or multiplied out.
MONARCH, DENSE = "monarch", "dense"
# The entries of a checkpoint's state that a resumed run needs.
_OF_A_RUN = ("epoch", "batch", "step", "seed", "rng", "train_step", "callbacks")
_NEW_HEAD = "train.init_from.reset_head=true begins with a new head"

logger = logging.getLogger("oneflow_accel")


def with_our_names(arrays: Mapping[str, np.ndarray], model: nn.Module) -> dict[str, np.ndarray]:
    """Rename the weights of a published T2T-ViT, as `python -m monarch_flow.convert t2t` does; the
    model's random features stay as drawn where the weights, made for softmax, lack them."""
    own = layouts.standard_state_dict(model)
    if _POSITIONS in own and is_published_t2t(arrays):
        logger.info("the weights have the names of the published T2T-ViT; they are renamed")
        arrays = t2t_names(arrays)
    drawn = {name: own[name].numpy() for name in own if name.endswith(".projection_matrix")}
    return drawn | dict(arrays)


def with_new_head(arrays: Mapping[str, np.ndarray], model: nn.Module) -> dict[str, np.ndarray]:
    """Replace the head's weights by the model's own and log it; UserError where it has no head."""
    own = layouts.standard_state_dict(model)
    head = {name: value.numpy() for name, value in own.items() if name.startswith(_HEAD)}
    if not head:
        raise UserError(f"{type(model).__name__} has no {_HEAD}* to begin anew")
    dropped = [name for name in arrays if name.startswith(_HEAD)]
    for name in dropped:
        logger.info("%s %s is left out: the head begins anew", name, arrays[name].shape)
    return {name: array for name, array in arrays.items() if name not in dropped} | head


def misfit(
    text: str,
    arrays: Mapping[str, np.ndarray],
    model: nn.Module,
    *,
    for_head: str = _NEW_HEAD,
    for_dense: str = "train.init_from.project=true projects them",
) -> CheckpointError:
    """The error for weights that do not fit: `text`, and lines that say what to do, if any helps.

    `for_head` is the advice for another number of classes, `for_dense` for dense weights and a
    structured model.
    """
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    lines = [text]
    ours, theirs = own.get(f"{_HEAD}weight"), arrays.get(f"{_HEAD}weight")
    if ours is not None and theirs is not None and len(theirs) != ours[0]:
        lines.append(
            f"The weights are for {len(theirs)} classes and the data has {ours[0]}: {for_head}"
        )
    weights = [arrays.get(f"{prefix}.weight") for prefix in structured_layers(model)]
    if for_dense and any(weight is not None and weight.ndim == 2 for weight in weights):
        lines.append(f"The weights are dense: {for_dense}")
    if (own.get(_PATCHES, (0,))[0], len(arrays.get(_PATCHES, ()))) == (768, 384):
        lines.append(
            "The weights are 384 wide and the model 768, as two models of the name "
            "vit_small_patch16_224 are: timm's is deit_small_patch16_224 here, "
            "model/t2tmodel=deit_s_16"
        )
    structured = next((name for name in sorted(arrays) if _is_structured(name, arrays, own)), None)
    if structured is not None:
        lines.append(
            f"The weights are of structured layers ({structured}), and the model is dense there: "
            "choose them with model.mlp_cfg or model.attnlinear_cfg, or make the weights dense by "
            "python -m monarch_flow.convert densify"
        )
    return CheckpointError("\n".join(lines))


def _is_structured(
    name: str, arrays: Mapping[str, np.ndarray], own: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether an array belongs to a structured layer where the model has a dense one: by its name,
    or by more than two axes."""
    prefix, _, kind = name.rpartition(".")
    if kind == "bias" or len(own.get(f"{prefix}.weight", ())) != 2:
        return False
    return arrays[name].ndim != 2 if kind == "weight" else name not in own


def read_model_arrays(
    path: str | Path, *, use_ema: bool = True
) -> tuple[dict[str, np.ndarray], str | None]:
    """The weights in a checkpoint or file, and what the layers in it are.

    `use_ema` takes the moving average where there is one, as that is what was validated. The second
    result is a checkpoint's phase (MONARCH or DENSE), None for a file. Raises UserError
    where there is nothing, or it cannot be read.
    """
    path = Path(path)
    # Of what is not there only a name with an ending was meant to be a file.
    named = path.is_file() or (path.suffix and not path.exists())
    if named and path.name not in ("latest", "best"):
        return read_weights(path, averaged=use_ema), None
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / "best").is_file():
        path = path / "best"
    return model_arrays(read_checkpoint(path), use_ema=use_ema)


def model_arrays(
    checkpoint: Checkpoint, *, use_ema: bool = True
) -> tuple[dict[str, np.ndarray], str | None]:
    """The same of a checkpoint that has been read."""
    averages = averages_in(checkpoint.optimizer) if use_ema else {}
    text = ", their moving average" if averages else ""
    logger.info("weights of %s%s", checkpoint.folder, text)
    return {**checkpoint.model, **averages}, checkpoint.state.get("phase")


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
    arrays, _ = on_rank_0(lambda: read_model_arrays(path, use_ema=use_ema))
    try:
        arrays = with_our_names(arrays, model)
        if reset_head:
            arrays = with_new_head(arrays, model)
        if project:
            arrays = _projected(arrays, model, layers)
        layouts.load_standard_state_dict(model, arrays, strict=True)
    except UserError as error:
        text = f"train.init_from.path={path}: {error}"
        advice = {"for_dense": ""} if project else {}
        raise misfit(text, arrays, model, **advice) from error


def _projected(
    arrays: Mapping[str, np.ndarray], model: nn.Module, layers: Mapping[str, LayerSpec]
) -> dict[str, np.ndarray]:
    own = {name: value.numpy() for name, value in layouts.standard_state_dict(model).items()}
    result: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        # Split packed projections where the model has three.
        parts = split_packed_projection(name, array)
        has_parts = next(iter(parts)).rpartition(".")[0] in layers
        result |= parts if has_parts else {name: array}
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
    if structured_layers(model) and (phase == DENSE or are_dense(arrays, model)):
        densify_model(model)


def are_dense(arrays: Mapping[str, np.ndarray], model: nn.Module) -> bool:
    """Whether weights are dense wherever a model is structured."""
    own = model.state_dict()
    names = [f"{prefix}.weight" for prefix in structured_layers(model)]
    # A masked layer's own weight is a matrix too, so it does not show that the source is dense.
    return all(
        name in arrays and arrays[name].ndim == 2 and (name not in own or own[name].ndim != 2)
        for name in names
    )


def load_model(
    model: nn.Module, checkpoint: Checkpoint, name: str, num_classes: int, *, switches: bool
) -> None:
    """Load a checkpoint's weights; where they are dense already, the model becomes dense first.

    `switches` says whether the run makes its layers dense. Raises CheckpointError where the
    checkpoint is of another model, or dense where the run's layers stay structured.
    """
    require_model(checkpoint, name, num_classes)
    phase = checkpoint.state.get("phase")
    train = (checkpoint.state.get("config") or {}).get("train") or {}
    switched = (train.get("sparse_to_dense") or {}).get("fraction") is not None
    if phase == DENSE and structured_layers(model) and not (switches or switched):
        raise CheckpointError(
            "the checkpoint's layers are dense, and those of this run are structured: resume it "
            "with the experiment that it comes from, or begin with its weights projected, "
            "train.init_from.path=PATH train.init_from.project=true"
        )
    match_layers(model, checkpoint.model, phase)
    try:
        layouts.load_standard_state_dict(model, checkpoint.model, strict=True)
    except UserError as error:
        text = f"the checkpoint is of another model: {error}"
        raise misfit(text, checkpoint.model, model) from error
