"""Reads and writes the folders of `oneflow.save`, without running code that lies in them.

    FOLDER/pickled_data                a pickle: containers, numbers, text, and names of tensors
           global_tensor_ID/meta, out  shape and dtype as protobuf text, and the raw elements

`oneflow.load` unpickles the first file as it is, which can call anything. Here the names in
`_ALLOWED` exist only, each bound to a plain container or to a stand-in of this file. And where
`oneflow.save` meets a full disk on the one process that writes, the others wait for it forever;
here an error on that process is an error on all.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0, whole
from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
from oneflow.framework import check_point_v2

from flow_train.files import writing

PICKLE = "pickled_data"
META = "meta"
DATA = "out"
_PROTOCOL_VERSION = 1
_TENSOR_FOLDER = re.compile(r"(global_)?tensor_\d+")


@dataclass(eq=False)
class StoredTensor:
    """A tensor in a folder, not read yet: the name of the sub-folder that holds it."""

    name: Any = None

    def __setstate__(self, state: Any) -> None:
        self.name = state.get("path") if isinstance(state, dict) else None

    def place(self, folder: Path) -> Path:
        """The sub-folder. CheckpointError if the name, which comes from the file, could lead out of
        it."""
        if not isinstance(self.name, str) or not _TENSOR_FOLDER.fullmatch(self.name):
            raise CheckpointError(f"{folder / PICKLE} names a tensor {self.name!r}; it is corrupt")
        return folder / self.name


_ALLOWED: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("oneflow", "Tensor"): StoredTensor,
    ("oneflow.nn", "Parameter"): StoredTensor,
    ("oneflow._oneflow_internal", "Tensor"): StoredTensor,
    ("oneflow.nn.parameter", "Parameter"): StoredTensor,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise CheckpointError(
                f"it wants to run `{module_name}.{global_name}` while it is loaded, and only plain "
                "tensors and containers are allowed; do not use it unless you trust its origin"
            ) from None


def read_structure(folder: Path | str) -> Any:
    """What was saved, with a `StoredTensor` in place of each tensor. Calls no other process.
    CheckpointError if the folder or its pickle is missing, damaged, or wants to run code."""
    file = Path(folder) / PICKLE
    try:
        return _structure(file.read_bytes(), file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def read_array(folder: Path | str, tensor: StoredTensor) -> np.ndarray:
    """The elements of one tensor. Calls no other process. CheckpointError if a file is missing, or
    the sizes of the two do not agree."""
    place = tensor.place(Path(folder))
    try:
        return _blob(place).numpy()
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror or error}") from error


def check(folder: Path | str) -> None:
    """Check by names and sizes that one saved folder is whole. Calls no other process.
    CheckpointError names the file that is missing or damaged."""
    folder = Path(folder)
    structure = read_structure(folder)
    _replace(structure, lambda tensor: _blob(tensor.place(folder)))


def load(folder: Path | str) -> Any:
    """What was saved, tensors as global ones on rank 0 of the host, sbp broadcast: as
    `oneflow.load(folder, global_src_rank=0)` gives them. Rank 0 reads; every process calls it and
    gets the errors of `check`."""
    folder = Path(folder)

    def read() -> bytes:
        check(folder)
        return (folder / PICKLE).read_bytes()

    content = on_rank_0(read)
    return _replace(
        _structure(content, folder / PICKLE),
        lambda tensor: check_point_v2._LoadSingleVariable(str(tensor.place(folder)), 0),
    )


def save(value: Any, folder: Path | str) -> None:
    """Write a value as `oneflow.save(value, folder, global_dst_rank=0)` does, into a new or empty
    folder. Every process calls it with the same structure; rank 0 writes. Tensors are global, or
    local and equal on all processes.

    Every process gets a CheckpointError if it could not be written (disk full, ...); TypeError if
    the value holds something that `load` would not give back.
    """
    distributed.settle()
    folder = Path(folder)
    buffer = io.BytesIO()
    writer = _Writer(buffer, folder)
    writer.dump({"protocol_version": _PROTOCOL_VERSION, "data": value})
    try:
        _structure(buffer.getvalue(), folder / PICKLE)
    except CheckpointError as error:
        raise TypeError(
            f"only tensors, containers, numbers and text can be saved: {error}"
        ) from error

    def finish() -> None:
        if writer.problem is not None:
            raise writer.problem
        with writing(folder, CheckpointError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PICKLE).write_bytes(buffer.getvalue())

    on_rank_0(finish)


class _Writer(pickle.Pickler):
    """A pickler that writes each tensor into a folder of its own. After an error it goes on, as the
    other processes do: to bring a tensor to rank 0 takes all of them."""

    def __init__(self, buffer: io.BytesIO, folder: Path) -> None:
        super().__init__(buffer, protocol=4)
        self._folder = folder
        self.problem: CheckpointError | None = None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, flow.Tensor):
            return NotImplemented
        local = whole(value)
        number = value.global_id() if value.is_global else id(value)
        name = f"global_tensor_{number}"
        if distributed.is_main() and self.problem is None:
            try:
                with writing(self._folder / name, CheckpointError):
                    os.makedirs(self._folder, exist_ok=True)
                    check_point_v2._save_tensor_to_disk(local, self._folder / name)
            except CheckpointError as error:
                self.problem = error
        return copyreg.__newobj__, (type(value),), {"path": name}  # type: ignore[attr-defined]


def _structure(content: bytes, file: Path) -> Any:
    try:
        value = _Reader(io.BytesIO(content)).load()
        if value["protocol_version"] != _PROTOCOL_VERSION:
            raise CheckpointError(f"it has protocol version {value['protocol_version']!r}, not 1")
        return value["data"]
    except CheckpointError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error
    # A damaged pickle can raise nearly anything: KeyError, IndexError, UnicodeDecodeError ...
    except Exception as error:
        raise CheckpointError(
            f"{file} is truncated or corrupt ({type(error).__name__}: {error})"
        ) from error


def _blob(place: Path) -> check_point_v2.FileBackendVariableBlob:
    for file in (place / META, place / DATA):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
    try:
        # Checks that the number of bytes is what shape and dtype make.
        return check_point_v2.FileBackendVariableBlob(str(place))
    except Exception as error:
        size = (place / DATA).stat().st_size
        raise CheckpointError(
            f"{place / DATA} ({size} bytes) is truncated, or its {META} is corrupt"
        ) from error


def _replace(value: Any, read: Callable[[StoredTensor], Any]) -> Any:
    """The structure with each stored tensor read, in its order. Everything is replaced once,
    however often it stands there: a few bytes can name a list a million times, or put it into
    itself."""
    done: dict[int, Any] = {}
    # Keeps what is replaced alive, so that no other object gets its id.
    alive: list[Any] = []

    def walk(node: Any) -> Any:
        if not isinstance(node, StoredTensor | dict | list | tuple):
            return node
        if id(node) in done:
            return done[id(node)]
        alive.append(node)
        done[id(node)] = node
        if isinstance(node, StoredTensor):
            done[id(node)] = read(node)
        elif isinstance(node, dict):
            for key in node:
                node[key] = walk(node[key])
        elif isinstance(node, list):
            node[:] = [walk(entry) for entry in node]
        else:
            done[id(node)] = tuple(walk(entry) for entry in node)
        return done[id(node)]

    return walk(value)
