"""Reads files written by `torch.save`, without torch and without running any code in them.

A checkpoint is a pickle, and unpickling can call anything. Here only the names in
`_ALLOWED_GLOBALS` exist, each bound to a function of this file or to a plain container.

Formats (torch/serialization.py of torch 2.x describes both):

- zip (torch >= 1.6): `<top>/data.pkl` is the pickle, `<top>/data/<key>` the bytes of one storage,
  `<top>/byteorder` says how they were written. torch stores without compression.
- legacy: the pickles of a magic number, a protocol version, a dict about the writing system, the
  object and the list of storage keys; then for each storage an int64 count of elements and its
  bytes.

In both, a tensor is a call to `_rebuild_tensor_v2(storage, offset, size, stride, ...)` and a
storage a persistent id, so tensors may share storages and be strided views of them.
"""

from __future__ import annotations

import math
import os
import pickle
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from oneflow_accel.errors import UserError

import numpy as np

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
ZIP_SIGNATURE = b"PK\x03\x04"
LEGACY_SIGNATURE = pickle.dumps(LEGACY_MAGIC, protocol=2)


@dataclass(frozen=True)
class StorageType:
    """Element type of a storage. bfloat16, which numpy lacks, is read as uint16 and then
    widened."""

    dtype: np.dtype[Any]
    is_bfloat16: bool = False


@dataclass
class Storage:
    """A flat array that tensors are views of; `data` is filled in once its bytes have been read."""

    type: StorageType
    numel: int
    data: np.ndarray | None = None

    def fill(self, raw: bytes) -> None:
        """Take the bytes as elements; UserError if their number is not the declared one."""
        needed = self.numel * self.type.dtype.itemsize
        if len(raw) != needed:
            raise UserError(f"a storage has {len(raw)} bytes where {needed} were declared")
        elements = np.frombuffer(raw, self.type.dtype)
        self.data = widen_bfloat16(elements) if self.type.is_bfloat16 else elements


@dataclass(frozen=True)
class TensorView:
    """A tensor as the pickle describes it: a strided view, in elements, of a storage."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def to_array(self) -> np.ndarray:
        """Copy out the elements, contiguous. UserError if the view reaches outside its storage, or
        repeats elements of it (an expanded tensor): a few bytes could then ask for any amount of
        memory."""
        numbers = (self.offset, *self.size, *self.stride)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise UserError(f"a tensor has offset, size and stride {numbers}")
        if len(self.size) != len(self.stride):
            raise UserError(f"a tensor has size {self.size} and stride {self.stride}")
        count = math.prod(self.size)
        if count > self.storage.numel:
            raise UserError(
                f"a tensor of size {self.size} has more elements than its storage "
                f"({self.storage.numel}); if it was expanded, save it after .contiguous()"
            )
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((length - 1) * step for length, step in steps)
        if count and last >= self.storage.numel:
            raise UserError(
                f"a tensor reaches element {last} of a storage of {self.storage.numel} elements"
            )
        try:
            if not count:
                return np.empty(self.size, self._data.dtype)
            view = np.lib.stride_tricks.as_strided(
                self._data[self.offset :],
                self.size,
                [step * self._data.itemsize for step in self.stride],
                writeable=False,
            )
        # Lengths or steps beyond 64 bits, or more axes than numpy has.
        except (ValueError, OverflowError) as error:
            raise UserError(f"a tensor of size {self.size}, stride {self.stride}") from error
        return np.array(view, order="C")

    @property
    def _data(self) -> np.ndarray:
        if self.storage.data is None:
            raise UserError("a tensor's storage is not in the file")
        return self.storage.data


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 array of bfloat16 numbers given as uint16: they are the upper halves of float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The inverse of `widen_bfloat16`, rounding to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    # Rounding could carry a NaN over into infinity or -0.
    return np.where(np.isnan(array), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def read_torch_file(path: Path) -> Any:
    """The object that was saved in a file that begins with ZIP_SIGNATURE or LEGACY_SIGNATURE,
    tensors as `TensorView`. UserError if it is truncated or corrupt, or needs a name that is not on
    the allow-list."""
    with path.open("rb") as file:
        reader = _read_zip if file.read(4) == ZIP_SIGNATURE else _read_legacy
        file.seek(0)
        try:
            return reader(file)
        except UserError:
            raise
        # A damaged pickle can raise nearly anything: KeyError, IndexError, UnicodeDecodeError ...
        except Exception as error:
            raise UserError(
                f"truncated or corrupt ({type(error).__name__}: {error}); fetch it again"
            ) from error


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> TensorView:
    if not (isinstance(storage, Storage) and isinstance(size, tuple) and isinstance(stride, tuple)):
        raise UserError("a tensor is not described by a storage, an offset, a size and a stride")
    return TensorView(storage, offset, size, stride)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    backward_hooks: Any,
    metadata: Any = None,
) -> TensorView:
    if metadata:
        raise UserError(f"a tensor has metadata ({metadata!r}); only plain tensors can be read")
    return _rebuild_tensor(storage, offset, size, stride)


def _rebuild_parameter(data: Any, requires_grad: Any, backward_hooks: Any) -> Any:
    return data


def _size(values: Any) -> tuple[Any, ...]:
    return tuple(values)


def _device(kind: Any, index: Any = None) -> str:
    return str(kind) if index is None else f"{kind}:{index}"


class _NumberType:
    """numpy's dtype of a plain number, such as "f8". Training scripts keep accuracies as numpy
    numbers beside the weights."""

    def __init__(self, name: Any, align: Any = False, copy: Any = False) -> None:
        if name not in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "b1"):
            raise UserError(f"it holds a numpy number of type {name!r}")
        self._dtype = np.dtype(f"<{name}")

    def __setstate__(self, state: Any) -> None:
        _version, order, *_ = state
        if order not in ("<", "|"):
            raise UserError(f"it holds a numpy number of byte order {order!r}")

    def read(self, data: Any) -> Any:
        return np.frombuffer(data, self._dtype, count=1)[0].item()


def _number(kind: Any, data: Any) -> Any:
    if not isinstance(kind, _NumberType) or not isinstance(data, bytes):
        raise UserError("a numpy number is not described by a type and bytes")
    return kind.read(data)


def _bytes(text: Any, encoding: Any) -> bytes:
    # Pickles of protocol 2 write bytes as a call of this.
    if not isinstance(text, str) or encoding != "latin1":
        raise UserError(f"it holds bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_STORAGE_TYPES = {
    "DoubleStorage": StorageType(np.dtype("<f8")),
    "FloatStorage": StorageType(np.dtype("<f4")),
    "HalfStorage": StorageType(np.dtype("<f2")),
    "BFloat16Storage": StorageType(np.dtype("<u2"), is_bfloat16=True),
    "LongStorage": StorageType(np.dtype("<i8")),
    "IntStorage": StorageType(np.dtype("<i4")),
    "ShortStorage": StorageType(np.dtype("<i2")),
    "CharStorage": StorageType(np.dtype("i1")),
    "ByteStorage": StorageType(np.dtype("u1")),
    "BoolStorage": StorageType(np.dtype("?")),
}

_ALLOWED_GLOBALS: dict[tuple[str, str], type | StorageType | Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    # torchvision's own training script saves its command line as one.
    ("argparse", "Namespace"): types.SimpleNamespace,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("numpy", "dtype"): _NumberType,
    ("numpy.core.multiarray", "scalar"): _number,
    ("numpy._core.multiarray", "scalar"): _number,
    ("_codecs", "encode"): _bytes,
    **{("torch", name): kind for name, kind in _STORAGE_TYPES.items()},
}


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler that knows the allowed names only and collects the storages it meets."""

    def __init__(self, file: IO[bytes]) -> None:
        # Files that Python 2 wrote hold their keys as byte strings.
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _ALLOWED_GLOBALS[module_name, global_name]
        except KeyError:
            raise UserError(
                f"it wants to run `{module_name}.{global_name}` while it is loaded, and only plain "
                "tensors and containers are allowed. If you trust the file, load it with torch and "
                "save `model.state_dict()` alone"
            ) from None

    def persistent_load(self, persistent_id: Any) -> Storage:
        # ("storage", type, key, location, numel); the legacy format adds a description of views of
        # storages, which torch has not written since tensors became views themselves.
        kind, storage_type, key, _location, numel, *view = persistent_id
        if kind != "storage" or not isinstance(storage_type, StorageType):
            raise UserError(f"it refers to an unknown kind of object: {kind!r}")
        if any(entry is not None for entry in view):
            raise UserError("it holds views of storages (torch < 0.4); save it again with torch")
        if type(numel) is not int or numel < 0:
            raise UserError(f"storage {key!r} declares {numel!r} elements")
        storage = self.storages.setdefault(str(key), Storage(storage_type, numel))
        if (storage.type, storage.numel) != (storage_type, numel):
            raise UserError(f"storage {key!r} is declared twice and differently")
        return storage


def _read_zip(file: IO[bytes]) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise UserError("its zip entries are compressed, which torch never does")
        # Entries may overlap in a zip file made to grow when it is read.
        if sum(info.file_size for info in entries.values()) > os.fstat(file.fileno()).st_size:
            raise UserError("its zip entries declare more bytes than the file has")
        pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UserError("a zip file without a `data.pkl`, so not one written by torch.save")
        top = pickles[0].removesuffix("data.pkl")
        if f"{top}byteorder" in entries and archive.read(f"{top}byteorder") != b"little":
            raise UserError("written on a big-endian machine; save it again on a little-endian one")
        with archive.open(pickles[0]) as stream:
            unpickler = _TensorUnpickler(stream)
            content = unpickler.load()
        for key, storage in unpickler.storages.items():
            name = f"{top}data/{key}"
            if name not in entries:
                raise UserError(f"the zip entry {name!r} is missing")
            storage.fill(archive.read(name))
        return content


def _read_legacy(file: IO[bytes]) -> Any:
    def load() -> Any:
        return _TensorUnpickler(file).load()

    if load() != LEGACY_MAGIC or load() != LEGACY_PROTOCOL:
        raise UserError("not a file of torch.save's legacy format, version 1001")
    if load().get("little_endian") is not True:
        raise UserError("written on a big-endian machine; save it again on a little-endian one")
    unpickler = _TensorUnpickler(file)
    content = unpickler.load()
    file_size = os.fstat(file.fileno()).st_size
    for key in load():
        storage = unpickler.storages[key]
        numel = int.from_bytes(file.read(8), "little")
        size = numel * storage.type.dtype.itemsize
        if numel != storage.numel or size > file_size - file.tell():
            raise UserError(f"storage {key!r} has fewer bytes than declared: the file is truncated")
        storage.fill(file.read(size))
    return content
