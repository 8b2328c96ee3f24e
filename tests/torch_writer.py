"""Writes what a test makes up as torch.save does (zip format of torch >= 1.6), without torch."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

_STORAGES = {"f4": "FloatStorage", "f8": "DoubleStorage", "f2": "HalfStorage", "i8": "LongStorage"}


def save_torch_file(path: Path, content: Any) -> Path:
    modules = _modules()
    stream = io.BytesIO()
    with mock.patch.dict(sys.modules, modules):
        pickler = _Pickler(stream, modules)
        pickler.dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(pickler.arrays):
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/version", "3\n")
    return path


class _Storage:
    """Stands for the bytes of one array."""

    def __init__(self, key: int, array: np.ndarray) -> None:
        self.key = str(key)
        self.array = array


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, modules: dict[str, types.ModuleType]) -> None:
        super().__init__(stream, protocol=2)
        self.arrays: list[np.ndarray] = []
        self._modules = modules

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(self._modules["torch"], _STORAGES[value.array.dtype.str[1:]])
        return ("storage", kind, value.key, "cpu", value.array.size)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        storage = _Storage(len(self.arrays), value)
        self.arrays.append(np.ascontiguousarray(value))
        strides = np.empty(value.shape, np.int8).strides
        rebuild = self._modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (storage, 0, value.shape, strides, False, OrderedDict())


def _modules() -> dict[str, types.ModuleType]:
    """What a pickle has to find while it is written."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in _STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def rebuild(*arguments: Any) -> None:
        raise AssertionError("only its name is used")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    rebuild.__name__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = rebuild  # type: ignore[attr-defined]
    return {"torch": torch, "torch._utils": utils}
