"""What the NVIDIA driver says about its GPUs, through its management library NVML.

NVML neither initializes CUDA nor makes a context, so asking it is safe before a fork. Functions
and constants: NVIDIA, "NVML API Reference Guide".
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SUCCESS = 0
_NAME_BYTES = 96


class NvmlError(Exception):
    """The driver is missing or does not answer; the text says which."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: NVML's index (PCI bus order), UUID, model name, (major, minor) compute capability
    and memory in bytes."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    total_memory: int


@dataclass(frozen=True)
class Driver:
    """The newest CUDA release that the driver supports, as (major, minor), and its GPUs."""

    cuda_version: tuple[int, int]
    gpus: tuple[Gpu, ...]


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def load_library() -> Any:
    """The management library, a `ctypes.CDLL`; NvmlError if it is not there."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NvmlError(f"no NVIDIA driver on this machine ({error})") from error


def query() -> Driver:
    """Ask the driver for its version and all its GPUs; NvmlError if there is none, or it reports an
    error."""
    library = load_library()
    _call(library, "nvmlInit_v2")
    try:
        version = ctypes.c_int()
        _call(library, "nvmlSystemGetCudaDriverVersion", ctypes.byref(version))
        count = ctypes.c_uint()
        _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        gpus = tuple(_gpu(library, index) for index in range(count.value))
    finally:
        _call(library, "nvmlShutdown")
    # NVML packs 11.7 as 11070.
    return Driver((version.value // 1000, version.value % 1000 // 10), gpus)


def visible(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: a list of indices or of (beginnings of) UUIDs, of which everything from the
    first unknown entry on is ignored. Indices are taken in PCI bus order, which is CUDA's where
    all GPUs are of one kind or CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    text = os.environ.get(VISIBLE_VARIABLE)
    if text is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            matches = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return tuple(chosen)


def _gpu(library: Any, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    capability = map(ctypes.byref, (major, minor))
    _call(library, "nvmlDeviceGetCudaComputeCapability", handle, *capability)
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return Gpu(
        index=index,
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        name=_text(library, "nvmlDeviceGetName", handle),
        capability=(major.value, minor.value),
        total_memory=memory.total,
    )


def _text(library: Any, function: str, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    _call(library, function, handle, buffer, ctypes.c_uint(_NAME_BYTES))
    return buffer.value.decode()


def _call(library: Any, function: str, *args: Any) -> None:
    try:
        code = getattr(library, function)(*args)
    except AttributeError as error:
        raise NvmlError(f"the NVIDIA driver is too old or incomplete: {error}") from error
    if code != _SUCCESS:
        raise NvmlError(f"the NVIDIA driver answers {function} with NVML error {code}")
