"""flowvision's classification models by name, and their weights from files and checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from oneflow_accel import layouts, settings
from oneflow_accel.agree import on_rank_0
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import CheckpointError, UserError

import flowvision.models
import numpy as np
import oneflow as flow
from flowvision.models import ModelCreator
from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, require_model, step_of
from flow_train.metrics.macs import count_parameters
from flow_train.optim import averages_in
from monarch_flow.engine.weights import read_model_arrays
from monarch_flow.layers import LinearConfig, replace_linears
from monarch_flow.projection import project_model
from monarch_flow.projection.state_dicts import total_relative_error

logger = logging.getLogger("oneflow_accel")


# Sub-packages of flowvision.models whose models do not map an image to class scores.
_OTHER_TASKS = ("detection", "segmentation", "style_transfer", "face_recognition")


def classification_models() -> list[str]:
    """Names that `create_model` accepts, sorted."""
    return sorted(
        name
        for name, create in ModelCreator._model_entrypoints.items()
        if not create.__module__.startswith(
            tuple(f"{flowvision.models.__name__}.{task}." for task in _OTHER_TASKS)
        )
    )


def create_model(arch: str, num_classes: int) -> nn.Module:
    """A randomly initialized model on the CPU, in NCHW; UserError if its class count is fixed."""
    try:
        return ModelCreator.create_model(arch, pretrained=False, num_classes=num_classes)
    except TypeError as error:
        if "multiple values for keyword argument 'num_classes'" not in str(error):
            raise UserError(f"{arch} cannot be built for {num_classes} classes: {error}") from error
    # flowvision's ConvNeXts for the 21,841 classes of ImageNet-22k set that number themselves.
    model = ModelCreator.create_model(arch, pretrained=False)
    model.head = nn.Linear(model.head.in_features, num_classes)
    model._init_weights(model.head)
    return model


def check_image_size(
    model: nn.Module, backend: Backend, arch: str, size: int, *, train: bool
) -> None:
    """Try a model on the device, in NCHW, on two blank images of `size` x `size` pixels; it stays
    as it is.

    In training mode a model may have further heads. Raises UserError where it cannot take the
    images.
    """
    buffers = [(buffer, buffer.numpy().copy()) for buffer in model.buffers()]
    was_training = model.training
    model.train(train)
    images = flow.zeros(2, 3, size, size, device=backend.device())
    try:
        with flow.no_grad():
            model(images)
    # A model's code may raise anything: its own assertion, or OneFlow's shape inference.
    except Exception as error:
        first = str(error).partition("\n")[0].strip()
        reason = f": {first}" if first and isinstance(error, AssertionError) else ""
        raise UserError(
            f"{arch} cannot take images of --image-size {size}{reason}; it was made for those of "
            f"{image_size_of(arch)} pixels a side"
        ) from error
    finally:
        model.train(was_training)
        with flow.no_grad():
            for buffer, before in buffers:
                buffer.copy_(flow.tensor(before, device=buffer.device))


def image_size_of(arch: str) -> int:
    """The image size that a model's name tells, or what its kind was made for."""
    if arch.startswith("inception"):
        return 299
    named = [int(part) for part in arch.split("_") if part.isdecimal() and 128 <= int(part) <= 1024]
    return named[-1] if named else 224


def pretrained_file(arch: str) -> Path:
    """The file that --pretrained reads. Nothing is fetched: the user puts the file there. Raises
    UserError where the folder is not set or has no file for this model."""
    folder = settings.WEIGHTS.get()
    suffixes = (".safetensors", ".pth") if folder else ()
    candidates = [Path(folder or "") / f"{arch}{suffix}" for suffix in suffixes]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " or ".join(map(str, candidates)) or f"${settings.WEIGHTS.name}, which is not set"
    raise UserError(
        f"--pretrained: no weights for {arch} (looked at {looked}). Nothing is downloaded at run "
        f"time: put torchvision's file there, or name one with --weights FILE"
    )


def load_weights(
    model: nn.Module, path: Path, arch: str, num_classes: int, *, reset_head: bool = False
) -> None:
    """Load a .pth or .safetensors file, or a run's best, into a model in whichever layout it is.

    `reset_head` leaves the weights that depend on the number of classes as they were drawn. Raises
    UserError where the file cannot be read, or lists all keys and shapes that do not fit.
    """
    state: Mapping[str, np.ndarray] = on_rank_0(lambda: read_model_arrays(path)[0])
    if reset_head:
        own = layouts.standard_state_dict(model)
        head = {name: own[name].numpy() for name in _head(arch, num_classes)}
        logger.info("the head begins anew: %s", ", ".join(head))
        state = {**state, **head}
    try:
        layouts.load_standard_state_dict(model, state, strict=True)
    except UserError as error:
        hint = "" if reset_head else _head_hint(state, arch, num_classes)
        raise UserError(f"{path} does not fit the model: {error}{hint}") from error


def make_structured(model: nn.Module, config: LinearConfig, batch: np.ndarray | None) -> None:
    """Replace all convolutions of one group but the first, in place, by fresh structured ones; with
    a batch of images, in the model's layout, by the nearest ones, and log how near by groups of
    layers and by the logits of the batch. UserError as `project_model`."""
    first = next((name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)), "")
    exclude, before = f"^{re.escape(first)}$", count_parameters(model).total
    if batch is None:
        replace_linears(model, config, exclude=exclude, kind=nn.Conv2d)
    else:
        model.eval()
        images = flow.tensor(batch, device=next(model.parameters()).device)
        with flow.no_grad():
            dense = model(images).numpy()
            reports = project_model(model, config, exclude=exclude, kind=nn.Conv2d)
            moved = np.linalg.norm(model(images).numpy() - dense) / np.linalg.norm(dense)
        model.train()
        for name, own in groupby(reports, lambda report: report.name.partition(".")[0]):
            logger.info("%s: relative error %.3f", name, total_relative_error(list(own)))
        error = total_relative_error(reports)
        logger.info("all: relative error %.3f, of the logits of a batch %.3f", error, moved)
    logger.info("%s parameters, dense %s", f"{count_parameters(model).total:,}", f"{before:,}")


def _head(arch: str, num_classes: int) -> list[str]:
    """Names of the weights whose shape depends on the number of classes."""
    ours, other = (
        {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for model in (create_model(arch, num_classes), create_model(arch, num_classes + 1))
    )
    return [name for name, shape in ours.items() if shape != other[name]]


def _head_hint(state: Mapping[str, np.ndarray], arch: str, num_classes: int) -> str:
    for name in _head(arch, num_classes):
        if name in state and state[name].shape[:1] != (num_classes,):
            return (
                f"\nThe weights are for {len(state[name])} classes and the data has "
                f"{num_classes}: --reset-head begins with a new head"
            )
    return ""


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
        best = on_rank_0(CheckpointManager(checkpoint.folder.parent).best)
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
