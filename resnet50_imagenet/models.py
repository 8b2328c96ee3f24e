"""flowvision's classification models, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from oneflow_accel import layouts
from oneflow_accel.errors import UserError
from oneflow_accel.training.weights import read_weights

import flowvision.models
import numpy as np
from flowvision.models import ModelCreator
from oneflow import nn

WEIGHTS_VARIABLE = "ONEFLOW_ACCEL_WEIGHTS"

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
    """A randomly initialized model on the CPU, in NCHW.

    Raises:
        UserError: the model does not take a number of classes other than ImageNet's 1000.
    """
    try:
        return ModelCreator.create_model(arch, pretrained=False, num_classes=num_classes)
    except TypeError as error:
        raise UserError(f"{arch} cannot be built for {num_classes} classes: {error}") from error


def pretrained_file(arch: str) -> Path:
    """The file that --pretrained reads. Nothing is fetched: the user puts the file there.

    Raises:
        UserError: the folder is not set or has no file for this model.
    """
    folder = os.environ.get(WEIGHTS_VARIABLE)
    candidates = (
        [Path(folder) / f"{arch}{suffix}" for suffix in (".safetensors", ".pth")]
        if (folder)
        else []
    )
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " or ".join(map(str, candidates)) or f"${WEIGHTS_VARIABLE}, which is not set"
    raise UserError(
        f"--pretrained: no weights for {arch} (looked at {looked}). Nothing is downloaded at run "
        f"time: put torchvision's file there, or name one with --weights FILE"
    )


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a .pth or .safetensors file into `model`, whichever layout the model is in.

    Raises:
        UserError: the file cannot be read, or its keys or shapes are not the model's; all of them
            are listed.
    """
    state: Mapping[str, np.ndarray] = read_weights(path)
    try:
        layouts.load_standard_state_dict(model, state, strict=True)
    except UserError as error:
        raise UserError(f"{path} does not fit the model: {error}") from error
