"""Reads the folders of `oneflow.save`, without running code that lies in them.

    FOLDER/pickled_data                a pickle: containers, numbers, text, and names of tensors
           global_tensor_ID/meta, out  shape and dtype as protobuf text, and the raw elements

`oneflow.load` unpickles the first file as it is, which can call anything. Here the names in
`_ALLOWED` exist only, each bound to a plain container or to a stand-in of this file. See
oneflow/framework/check_point_v2.py.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError

import numpy as np
from google.protobuf import text_format
from oneflow.core.common import data_type_pb2
from oneflow.core.framework import variable_meta_info_pb2

from flow_train.checkpoint.torch_files import widen_bfloat16

PICKLE = "pickled_data"
META = "meta"
DATA = "out"
_PROTOCOL_VERSION = 1
_TENSOR_FOLDER = re.compile(r"(global_)?tensor_\d+")
_DTYPES = {
    "kFloat": "<f4",
    "kDouble": "<f8",
    "kFloat16": "<f2",
    "kBFloat16": "<u2",
    "kInt8": "i1",
    "kUInt8": "u1",
    "kInt32": "<i4",
    "kInt64": "<i8",
    "kBool": "?",
}


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
    """The elements of one tensor, of bfloat16 as float32. CheckpointError if a file is missing or
    damaged, or the sizes of the two do not agree."""
    place = tensor.place(Path(folder))
    try:
        dtype, shape = _kind(place)
        data = (place / DATA).read_bytes()
        size = math.prod(shape) * dtype.itemsize
        if len(data) != size:
            raise CheckpointError(
                f"{place / DATA} is truncated or corrupt: {len(data)} bytes where {shape} of "
                f"{dtype} needs {size}"
            )
        flat = np.frombuffer(data, dtype)
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror or error}") from error
    return (widen_bfloat16(flat) if dtype == np.uint16 else flat).reshape(shape)


def check(folder: Path | str) -> None:
    """Check that one saved folder is whole. CheckpointError names the file that is missing or
    damaged."""
    folder = Path(folder)
    for tensor in _tensors(read_structure(folder)):
        read_array(folder, tensor)


def _kind(place: Path) -> tuple[np.dtype, tuple[int, ...]]:
    meta = variable_meta_info_pb2.VariableMetaInfo()
    try:
        text_format.Parse((place / META).read_text(encoding="utf-8"), meta)
        name = data_type_pb2.DataType.Name(meta.data_type)
    except (text_format.ParseError, ValueError) as error:
        raise CheckpointError(f"{place / META} is corrupt ({error})") from error
    if name not in _DTYPES:
        raise CheckpointError(f"{place.name} holds elements of type {name}, which is not supported")
    shape = tuple(meta.shape.dim)
    if min(shape, default=1) < 0:
        raise CheckpointError(f"{place / META} is corrupt: a tensor of shape {shape}")
    return np.dtype(_DTYPES[name]), shape


def _tensors(value: Any) -> list[StoredTensor]:
    """The tensors in nested containers. Each container is looked at once, however often it stands
    there: a few bytes can name a list a million times, or put it into itself."""
    found, left, seen = [], [value], set()
    while left:
        node = left.pop()
        if isinstance(node, StoredTensor):
            found.append(node)
        elif isinstance(node, dict | list | tuple) and id(node) not in seen:
            seen.add(id(node))
            left += node.values() if isinstance(node, dict) else node
    return found


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
