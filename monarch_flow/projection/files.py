"""Weights to convert: any file or training checkpoint in, safetensors or a checkpoint out."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from oneflow_accel.errors import UserError
from oneflow_accel.training.checkpoint import Checkpoint, CheckpointManager, read_checkpoint
from oneflow_accel.training.files import replace_file
from oneflow_accel.training.weights import read_weights

import numpy as np
import safetensors
import safetensors.numpy

from monarch_flow.projection.layer_specs import layers_from_json, layers_to_json
from monarch_flow.projection.structure import LayerSpec

SUFFIX = ".safetensors"
# Of the entry that describes the structured layers: in a safetensors file.s metadata, in a
# checkpoint.s state.
LAYERS = "monarch_flow.layers"


@dataclass
class Source:
    """What was read.

    Attributes:
        path: from where.
        weights: parameters and buffers by name.
        layers: structured layers by module name as the file describes them; None where it does not.
        checkpoint: the training checkpoint, where it is one.
    """

    path: Path
    weights: dict[str, np.ndarray]
    layers: dict[str, LayerSpec] | None = None
    checkpoint: Checkpoint | None = field(default=None, repr=False)


def read_source(path: Path, *, averaged: bool = True) -> Source:
    """Read weights: a file of `torch.save` or safetensors, or a training checkpoint (its folder,
    the folder of several, `latest` or `best` in it, or the folder of a run).

    Args:
        path: of it.
        averaged: of a file that has both weights and their moving average take the latter. A
            training checkpoint is read whole.

    Raises:
        UserError: it is not there, damaged, or of another format.
    """
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if path.is_dir() or path.name in ("latest", "best"):
        checkpoint = read_checkpoint(path)
        weights, described = checkpoint.model, checkpoint.state.get(LAYERS)
    else:
        checkpoint = None
        weights = read_weights(path, averaged=averaged)
        described = _metadata(path).get(LAYERS)
    try:
        layers = None if described is None else layers_from_json(described)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return Source(path, weights, layers, checkpoint)


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Check that the result may be written, before minutes of work.

    Args:
        source: what is read; never written to.
        target: a safetensors file, or the folder of a new checkpoint.
        overwrite: whether a file may be replaced.

    Raises:
        UserError: it may not; says why and what to do.
    """
    same = target.exists() and source.exists() and target.samefile(source)
    if same or target.resolve() == source.resolve():
        raise UserError(f"{target} is the input itself, which is never overwritten; name another")
    if target.resolve() in source.resolve().parents:
        raise UserError(f"{target} contains the input; name another place")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target} is a folder that holds something; name a new one, or a file")
    if target.is_file() and not overwrite:
        raise UserError(f"{target} exists; name another file, or replace it with --overwrite")
    if target.suffix == SUFFIX and not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent} to write {target.name} to")


def write_weights(
    path: Path, weights: dict[str, np.ndarray], layers: dict[str, LayerSpec] | None = None
) -> None:
    """Write a safetensors file, in one step; its metadata describes the structured layers.

    Raises:
        UserError: it could not be written.
    """
    metadata = {"format": "pt", **({LAYERS: layers_to_json(layers)} if layers else {})}
    tensors = {name: np.asarray(array, order="C") for name, array in weights.items()}
    try:
        replace_file(path, safetensors.numpy.save(tensors, metadata))
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a new folder; returns its own folder there.

    Raises:
        UserError: it could not be written.
    """
    step = checkpoint.state.get("step", 0)
    manager = CheckpointManager(folder)
    try:
        manager.claim(fresh=True)
        return manager.save(checkpoint, step=step if isinstance(step, int) else 0)
    finally:
        manager.close()


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; nothing for another one. The file has been read."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] != b"{" or len(head) < 9 or struct.unpack("<Q", head[:8])[0] == 0:
        return {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except safetensors.SafetensorError:
        return {}
