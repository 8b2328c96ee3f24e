"""Going on with a run of timm's or ViTAE's training script from the file that it saved.

Such a file numbers AdamW's moments by parameter: first those without weight decay, then the others,
each in the order of the state dict. We try out which ones those are; the moments' shapes say what
is right.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint
from flow_train.checkpoint.torch_files import (
    LEGACY_SIGNATURE,
    ZIP_SIGNATURE,
    TensorView,
    read_torch_file,
)
from flow_train.checkpoint.weights import arrays_of
from flow_train.optim import EMA_PREFIX, TOKEN_NAMES
from monarch_flow.engine.weights import DENSE, MONARCH, are_dense, with_our_names

# Torch's names of the optimizer's state, and ours.
_STATE_KEYS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "momentum",
}
_AVERAGES = "state_dict_ema"
# timm's default, where the file does not name another.
_SEED = 42

# The errors that reading malformed entries of a dict raises.
_STRANGE = (KeyError, TypeError, AttributeError, ValueError, IndexError)

logger = logging.getLogger("oneflow_accel")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class OtherRun:
    """A training checkpoint of timm or ViTAE. `content` is what `read_torch_file` gave, `epoch` the
    one to go on with, `seed` that of the run where its options are in the file."""

    path: str
    content: Mapping[str, Any]
    epoch: int
    seed: int

    def checkpoint(
        self, model: nn.Module, name: str, num_classes: int, *, seed: int, images: int
    ) -> Checkpoint:
        """The run as a checkpoint of ours, for `model` as configured.

        `seed` is for the rest of the run, `images` are per optimizer step. Raises CheckpointError
        where the file is of another model, or its optimizer's state does not fit.
        """
        try:
            weights = with_our_names(arrays_of(self.content, averaged=False), model)
            moments, step = self._moments(_trained(weights, model))
            averages = {}
            if isinstance(self.content.get(_AVERAGES), Mapping):
                averages = arrays_of({_AVERAGES: self.content[_AVERAGES]})
                averages = with_our_names(averages, model)
        except UserError as error:
            raise CheckpointError(f"resume={self.path}: {error}") from error
        except _STRANGE as error:
            raise CheckpointError(
                f"resume={self.path}: it is not as timm's or ViTAE's script writes it "
                f"({type(error).__name__}: {error}); begin with its weights: "
                f"train.init_from.path={self.path}"
            ) from error
        callbacks = {"ema": {"num_updates": step}} if averages else {}
        scaler = self.content.get("amp_scaler")
        scale = {}
        if isinstance(scaler, Mapping) and isinstance(scaler.get("scale"), int | float):
            good_steps = scaler.get("_growth_tracker")
            good_steps = good_steps if isinstance(good_steps, int) else 0
            scale = {"loss_scale": {"scale": float(scaler["scale"]), "good_steps": good_steps}}
        logger.info(
            "%s: epoch %d, %d steps of the optimizer%s; the order of images is this run's own",
            self.path,
            self.epoch,
            step,
            ", moving averages" if averages else "",
        )
        state = {
            "num_classes": num_classes,
            "epoch": self.epoch,
            "batch": 0,
            "step": step,
            "phase": DENSE if are_dense(weights, model) else MONARCH,
            "global_batch_size": images,
            "accumulate": 1,
            "seed": seed,
            # None to restore.
            "rng": [],
            "train_step": scale,
            "callbacks": callbacks,
        }
        arrays = {**moments, **{EMA_PREFIX + key: array for key, array in averages.items()}}
        return Checkpoint(weights, arrays, state, name)

    def _moments(self, shapes: Shapes) -> tuple[dict[str, np.ndarray], int]:
        """The optimizer's arrays by our KEY/NAME, and the number of its steps."""
        entries = self.content["optimizer"]["state"]
        groups = [list(group["params"]) for group in self.content["optimizer"]["param_groups"]]
        numbers = list(itertools.chain(*groups))
        arrays = {number: _arrays(entries.get(number, {})) for number in numbers}
        if not any(arrays.values()):
            raise UserError("its optimizer has no state")
        for names in _orders(shapes, [len(group) for group in groups]):
            fits = all(
                array.shape == shapes[name]
                for name, number in zip(names, numbers, strict=True)
                for array in arrays[number].values()
            )
            if fits:
                break
        else:
            raise UserError(
                f"its optimizer has {len(numbers)} parameters in {len(groups)} groups, which are "
                f"not the {len(shapes)} that the model trains, in the order of timm or ViTAE; "
                f"begin with its weights: train.init_from.path={self.path}"
            )
        named = {
            f"{key}/{name}": array
            for name, number in zip(names, numbers, strict=True)
            for key, array in arrays[number].items()
        }
        return named, max(_step(entries.get(number, {})) for number in numbers)


def read_other_run(path: str | None) -> OtherRun | None:
    """The run in a torch file; None where `path` names no such file. Raises CheckpointError where
    the file cannot be read, or has weights but no run to go on with."""
    if path is None or not Path(path).is_file() or Path(path).name in ("latest", "best"):
        return None
    begins = f"start a run from them with train.init_from.path={path}"
    try:
        with Path(path).open("rb") as file:
            head = file.read(len(LEGACY_SIGNATURE))
        is_torch = head.startswith((ZIP_SIGNATURE, LEGACY_SIGNATURE))
        content = read_torch_file(Path(path)) if is_torch else None
    except (OSError, UserError) as error:
        raise CheckpointError(f"resume={path} cannot be read: {error}") from error
    optimizer = content.get("optimizer") if isinstance(content, Mapping) else None
    parts = ("state", "param_groups")
    whole = isinstance(optimizer, Mapping) and all(part in optimizer for part in parts)
    if not isinstance(content, Mapping) or not whole or not isinstance(content.get("epoch"), int):
        raise CheckpointError(
            f"resume={path} is a file of weights, which holds no run to go on with; {begins}"
        )
    # Files of the first version name the epoch to go on with, later ones the one that just ended.
    version = content.get("version")
    ended = isinstance(version, int) and version > 1
    seed = getattr(content.get("args"), "seed", None)
    seed = seed if isinstance(seed, int) and seed >= 0 else _SEED
    return OtherRun(str(path), content, max(0, content["epoch"] + ended), seed)


def _trained(weights: Mapping[str, np.ndarray], model: nn.Module) -> Shapes:
    """Shapes of the parameters that are trained, in the order of the file."""
    frozen = {name for name, _ in model.named_buffers()}
    frozen |= {name for name, value in model.named_parameters() if not value.requires_grad}
    return {name: array.shape for name, array in weights.items() if name not in frozen}


def _orders(shapes: Shapes, sizes: Sequence[int]) -> Iterator[list[str]]:
    """The possible orders of the optimizer's parameters, for groups of these sizes."""
    if list(sizes) == [len(shapes)]:
        yield list(shapes)
    # Biases and vectors are never decayed, tokens are in some versions.
    vectors = {n for n, shape in shapes.items() if len(shape) <= 1 or n.endswith(".bias")}
    for undecayed in (vectors.union(TOKEN_NAMES), vectors):
        first = [name for name in shapes if name in undecayed]
        rest = [name for name in shapes if name not in undecayed]
        if [len(first), len(rest)] == list(sizes):
            yield first + rest


def _arrays(entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        ours: entry[theirs].to_array().astype(np.float32)
        for theirs, ours in _STATE_KEYS.items()
        if isinstance(entry.get(theirs), TensorView)
    }


def _step(entry: Mapping[str, Any]) -> int:
    # A number before torch 1.12, a tensor since.
    step = entry.get("step", 0)
    return int(step.to_array()) if isinstance(step, TensorView) else int(step)
