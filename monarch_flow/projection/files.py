"""Weights to convert: any file or training checkpoint in, safetensors or a checkpoint out."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import safetensors

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, read_checkpoint
from flow_train.checkpoint.resume import require_no_other_run
from flow_train.checkpoint.torch_files import narrow_to_bfloat16
from flow_train.checkpoint.weights import bfloat16_names, read_weights
from flow_train.files import replace_file
from monarch_flow.projection.layer_specs import layers_from_json, layers_to_json
from monarch_flow.projection.structure import LayerSpec, joined

SUFFIX = ".safetensors"
# The key of the structured layers' description: in the metadata of a safetensors file, and in a
# checkpoint's state.
LAYERS = "monarch_flow.layers"


@dataclass
class Source:
    """What was read.

    Attributes:
        layers: structured layers by module name as the file describes them; None where it does not.
        checkpoint: the training checkpoint, where it is one.
        bfloat16: names of the arrays that are bfloat16 in the file, and float32 here.
    """

    path: Path
    weights: dict[str, np.ndarray]
    layers: dict[str, LayerSpec] | None = None
    checkpoint: Checkpoint | None = field(default=None, repr=False)
    bfloat16: frozenset[str] = frozenset()

    def keeps_bfloat16(self, name: str) -> bool:
        """Whether a converted array should be bfloat16: as in the file, and a new name as the
        others of its layer, or else as most of the file's."""
        if name in self.weights:
            return name in self.bfloat16
        layer = name.rpartition(".")[0]
        owners = (key.rpartition(".")[::2] for key in self.weights)
        inside = [joined(of, kind) for of, kind in owners if of == layer and kind != "bias"]
        floats = [key for key in inside or self.weights if self.weights[key].dtype.kind == "f"]
        return 2 * len(self.bfloat16.intersection(floats)) > len(floats)


def read_source(path: Path, *, averaged: bool = True) -> Source:
    """Read a file of `torch.save` or safetensors, or a training checkpoint or run by its folder.

    `averaged` takes the moving averages of a file that has both; a training checkpoint is read
    whole. Raises UserError where it is not there, damaged, or of another format.
    """
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    bfloat16: frozenset[str] = frozenset()
    if path.is_dir() or path.name in ("latest", "best"):
        checkpoint = read_checkpoint(path)
        weights, described = checkpoint.model, checkpoint.state.get(LAYERS)
    else:
        checkpoint = None
        weights = read_weights(path, averaged=averaged)
        bfloat16 = bfloat16_names(path, averaged=averaged)
        described = _metadata(path).get(LAYERS)
    try:
        layers = None if described is None else layers_from_json(described)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return Source(path, weights, layers, checkpoint, bfloat16)


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise UserError where the result may not be written, before minutes of work.

    The source is never written to. `target` is a safetensors file, which `overwrite` may replace,
    or the folder of a new checkpoint.
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
    path: Path,
    weights: dict[str, np.ndarray],
    layers: dict[str, LayerSpec] | None = None,
    *,
    bfloat16: Collection[str] = (),
) -> None:
    """Write a safetensors file, in one step; its metadata describes the structured layers.

    `bfloat16` names the arrays to store as such, which numpy does not have. Raises UserError where
    writing fails.
    """
    metadata = {"format": "pt", **({LAYERS: layers_to_json(layers)} if layers else {})}
    kept = {
        name: narrow_to_bfloat16(array) if name in bfloat16 else np.asarray(array, order="C")
        for name, array in weights.items()
    }
    # The tensors point into `kept`, which must live until they are written.
    tensors = {
        name: safetensors.TensorSpec(
            dtype="bfloat16" if name in bfloat16 else array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in kept.items()
    }
    try:
        replace_file(path, bytes(safetensors.serialize(tensors, metadata)))
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a new folder; returns its own folder there. Raises UserError."""
    step = checkpoint.state.get("step", 0)
    manager = CheckpointManager(folder)
    try:
        require_no_other_run(folder)
        manager.claim()
        return manager.save(checkpoint, step=step if isinstance(step, int) else 0)
    finally:
        manager.close()


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file that has been read; nothing for another file."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] != b"{" or len(head) < 9 or struct.unpack("<Q", head[:8])[0] == 0:
        return {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except safetensors.SafetensorError:
        return {}
