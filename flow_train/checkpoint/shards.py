"""Tensors that are cut over processes, in files: what pieces there are, how they make up whole
tensors, and how these are read without ever holding more than one.

A *layout* says for each shard which tensors, its slots, it is a piece of: flattened, one after the
other, padded with zeros to `processes * length` numbers. A process has the piece at its place.
Arrays are named KEY/NAME, KEY being `model` for the parameters themselves and `exp_avg` for a
moment; NAME is a shard's in a file of pieces and a tensor's elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError

import numpy as np
from safetensors import SafetensorError, safe_open

from flow_train.files import SyncedFile

MODEL = "model"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """One whole tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardLayout:
    """`groups` has by the name of a shard its slots and its length; this process has the pieces at
    `place` of `processes`."""

    processes: int
    place: int
    groups: Mapping[str, tuple[Sequence[Slot], int]]

    @classmethod
    def even(cls, processes: int, place: int, shapes: Mapping[str, tuple[int, ...]]) -> ShardLayout:
        """Each tensor cut for itself, without more zeros than needed."""
        slots = [Slot(name, shape) for name, shape in shapes.items()]
        groups = {slot.name: ([slot], -(-slot.size // processes)) for slot in slots}
        return cls(processes, place, groups)

    def as_json(self) -> dict[str, Any]:
        groups = {
            name: {"length": length, "tensors": [[slot.name, list(slot.shape)] for slot in slots]}
            for name, (slots, length) in self.groups.items()
        }
        return {"processes": self.processes, "shards": groups}

    @classmethod
    def of_json(cls, content: Mapping[str, Any], place: int = 0) -> ShardLayout:
        groups = {
            name: ([Slot(n, tuple(shape)) for n, shape in group["tensors"]], int(group["length"]))
            for name, group in content["shards"].items()
        }
        return cls(int(content["processes"]), place, groups)

    def file_of(self, place: int) -> str:
        return f"shard-{place:05d}-of-{self.processes:05d}.safetensors"

    def places(self) -> dict[str, tuple[str, int, Slot]]:
        """Each tensor's shard, and where in the whole of it the tensor begins."""
        found = {}
        for name, (slots, _) in self.groups.items():
            begin = 0
            for slot in slots:
                found[slot.name] = (name, begin, slot)
                begin += slot.size
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, (_, _, slot) in self.places().items()}


class Pieces(Mapping[str, np.ndarray]):
    """Arrays that are read when they are asked for, and not kept."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class OwnPieces(Pieces):
    """Of whole arrays, what the process of a layout keeps: pieces, and what is not cut as it is.

    Names in `arrays` are KEY/NAME, or NAME where there is no KEY; `as_key` gives those one.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], layout: ShardLayout, as_key: str | None = None
    ) -> None:
        self._arrays, self._layout, self._as_key = arrays, layout, as_key
        places = layout.places()
        super().__init__(
            _join(as_key or key, places[name][0] if name in places else name)
            for key, name in map(_split, arrays)
        )

    def __getitem__(self, full_name: str) -> np.ndarray:
        if full_name not in self:
            raise KeyError(full_name)
        key, name = _split(full_name)
        if key == self._as_key:
            key = ""
        if name not in self._layout.groups:
            return self._arrays[_join(key, name)]
        return self.piece(key, name)

    def piece(self, key: str, name: str) -> np.ndarray:
        """This process's piece of a shard, (length,), of the arrays' dtype; CheckpointError where a
        tensor of it is missing or of another size."""
        slots, length = self._layout.groups[name]
        begin = self._layout.place * length
        found: list[np.ndarray] = []
        offset = 0
        for slot in slots:
            first, last = max(begin - offset, 0), min(begin + length - offset, slot.size)
            if first < last:
                found.append(self._part(_join(key, slot.name), slot, first, last))
            offset += slot.size
        missing = length - sum(map(len, found))
        if missing:
            found.append(np.zeros(missing, found[0].dtype if found else np.float32))
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _part(self, name: str, slot: Slot, first: int, last: int) -> np.ndarray:
        if name not in self._arrays:
            raise CheckpointError(f"the checkpoint has no {name}")
        if isinstance(self._arrays, ShardedArrays):
            found = self._arrays.shape(name)
            if found == slot.shape:
                return self._arrays.part(name, first, last)
        else:
            array = self._arrays[name]
            found = array.shape
            if found == slot.shape:
                return array.reshape(-1)[first:last]
        raise CheckpointError(
            f"{name} has shape {found} in the checkpoint and {slot.shape} in this model"
        )


class FileArrays(Pieces):
    """The arrays of one safetensors file, by name; `metadata` is the text in its header.
    CheckpointError where it is not one."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        super().__init__(self._file.keys())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self:
            raise KeyError(name)
        return self._file.get_tensor(name)


class ShardedArrays(Pieces):
    """The whole arrays of a folder of pieces, by KEY/NAME, or by NAME for the one `key`: each is
    put together when it is asked for. CheckpointError names a file that is not there or damaged."""

    def __init__(self, folder: Path, layout: ShardLayout, key: str | None = None) -> None:
        self._folder, self._layout = folder, layout
        self._files: dict[int, Any] = {}
        # What is stored, and of a tensor that is cut where it begins in the whole of its shard.
        self._found: dict[str, tuple[str, int, Slot | None]] = {}
        # Every process writes what is not cut, and may have its own file only.
        self._whole_from = next(
            (p for p in range(layout.processes) if (folder / layout.file_of(p)).exists()), 0
        )
        for found_key, name in map(_split, self._file(self._whole_from).keys()):
            if (key is None and found_key == MODEL) or (key is not None and found_key != key):
                continue
            prefix, stored = found_key if key is None else "", _join(found_key, name)
            if name not in layout.groups:
                self._found[_join(prefix, name)] = (stored, 0, None)
            begin = 0
            for slot in layout.groups.get(name, ((), 0))[0]:
                self._found[_join(prefix, slot.name)] = (stored, begin, slot)
                begin += slot.size
        super().__init__(self._found)

    def __getitem__(self, full_name: str) -> np.ndarray:
        stored, _, slot = self._found[full_name]
        if slot is None:
            return self._read(self._whole_from, stored)
        return self.part(full_name, 0, slot.size).reshape(slot.shape)

    def shape(self, full_name: str) -> tuple[int, ...]:
        slot = self._found[full_name][2]
        return tuple(self[full_name].shape) if slot is None else slot.shape

    def dtype(self, full_name: str) -> np.dtype:
        """Without reading the array."""
        part = self._file(self._whole_from).get_slice(self._found[full_name][0])
        return np.dtype(_DTYPES[part.get_dtype()])

    def part(self, full_name: str, first: int, last: int) -> np.ndarray:
        """Numbers `first` to `last` of an array that is cut, flattened."""
        stored, offset, _ = self._found[full_name]
        length = self._layout.groups[_split(stored)[1]][1]
        found = []
        position, end = offset + first, offset + last
        while position < end:
            place, inside = divmod(position, length)
            take = min(end - position, length - inside)
            found.append(self._read(place, stored, inside, inside + take))
            position += take
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _read(self, place: int, name: str, *bounds: int) -> np.ndarray:
        try:
            if bounds:
                return self._file(place).get_slice(name)[slice(*bounds)]
            return self._file(place).get_tensor(name)
        except SafetensorError as error:
            path = self._folder / self._layout.file_of(place)
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def _file(self, place: int) -> Any:
        if place not in self._files:
            path = self._folder / self._layout.file_of(place)
            try:
                self._files[place] = safe_open(path, framework="numpy")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is missing: a shard of process {place}") from error
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
        return self._files[place]


def joined(parts: Sequence[Mapping[str, np.ndarray]], layout: ShardLayout) -> dict[str, np.ndarray]:
    """Whole tensors by name, of the pieces of all processes in the order of their places."""
    found = {name: array for name, array in parts[0].items() if name not in layout.groups}
    for name, (slots, _) in layout.groups.items():
        whole, begin = np.concatenate([part[name] for part in parts]), 0
        for slot in slots:
            found[slot.name] = whole[begin : begin + slot.size].reshape(slot.shape)
            begin += slot.size
    return found


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[np.dtype, Sequence[int]]],
    read: Callable[[str], Any],
    metadata: Mapping[str, str],
) -> str:
    """Write a new safetensors file tensor by tensor, in the order of `shapes`, dtype and shape by
    name; `read(name)` gives each when it is due. Returns the file's SHA-256.

    https://huggingface.co/docs/safetensors describes the format: the length of the header, the
    header as JSON, the numbers.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + np.dtype(dtype).itemsize * math.prod(shape)
        code = _CODES[np.dtype(dtype)]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with SyncedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in shapes.items():
            array = np.asarray(read(name), dtype=dtype, order="C")
            if array.shape != tuple(shape):
                raise ValueError(f"{name} has shape {array.shape}, not {tuple(shape)}")
            file.write(array.reshape(-1).view(np.uint8).data)
    return file.sha256


def _split(full_name: str) -> tuple[str, str]:
    key, _, name = full_name.rpartition("/")
    return key, name


def _join(key: str, name: str) -> str:
    return f"{key}/{name}" if key else name
