"""Writes the results of an evaluation to a file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from omegaconf import DictConfig
from oneflow import nn

from flow_train.files import replace_file
from flow_train.options import section
from flow_train.validation import Accuracy


class ResultsFile:
    """Gathers the results of an evaluation; process 0 writes them as JSON. An empty path writes
    nothing. An unwritable path is a UserError right here, as an evaluation may take hours."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._content: dict[str, Any] = {}
        if self._path is None:
            return
        folder = self._path.parent
        if self._path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(
                f"eval.results_file={path} cannot be written: it has to be a file in a folder that "
                "is there and can be written to"
            )

    def describe(self, cfg: DictConfig, name: str, model: nn.Module) -> None:
        data, options = section(cfg, "datamodule"), section(cfg, "eval")
        transforms = data.get("val_transforms") or {}
        parameters = list(model.parameters())
        self._content |= {
            "model": name,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "checkpoint": options.get("ckpt"),
            "use_ema": options.get("use_ema", True),
            "data_dir": data.get("data_dir"),
            "image_size": data.get("image_size"),
            "crop_pct": transforms.get("crop_pct"),
            "interpolation": transforms.get("interpolation"),
            "real_labels": options.get("real_labels"),
        }

    def add(self, split: str, accuracy: Accuracy, seconds: float) -> None:
        """Note the accuracy on "val" or "test", in percent, and the seconds it took."""
        figures: dict[str, Any] = {
            "images": accuracy.images,
            # JSON has no NaN.
            "loss": accuracy.loss if math.isfinite(accuracy.loss) else None,
            "top1": accuracy.acc1,
            "top5": accuracy.acc5,
            "seconds": round(seconds, 3),
        }
        if accuracy.real is not None:
            figures |= {
                "real_top1": accuracy.real.acc1,
                "real_top5": accuracy.real.acc5,
                "real_images": accuracy.real.images,
            }
        self._content[split] = figures

    def write(self) -> None:
        """Write the file in one step; UserError where that fails."""
        if self._path is None or not distributed.is_main():
            return
        try:
            replace_file(self._path, (json.dumps(self._content, indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(
                f"eval.results_file={self._path} could not be written: {error.strerror or error}"
            ) from error
