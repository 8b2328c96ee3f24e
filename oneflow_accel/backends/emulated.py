"""An accelerator that is emulated, for machines that have none: memory that the host cannot touch,
streams and events, over the kernels of the CPU.

It shows what a GPU or another card would see of a program, and finds what only holds on a CPU. It
is not faster than the CPU, and has none of a vendor's numerics. Its library (`emulated/`) fills
OneFlow's device type `mock`, which is empty, and is loaded when the device is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from oneflow_accel import settings
from oneflow_accel.backends import profile
from oneflow_accel.backends.base import Backend, DeviceProperties
from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.errors import DeviceUnavailableError, UserError
from oneflow_accel.kernels import plugin

import oneflow as flow

# What the library counts, in its order; at last the operators that the CPU has, and it.
COUNTERS = (
    *("launches", "copies_to_device", "copies_to_host", "copies_on_device", "streams"),
    *("cpu_operators", "operators"),
)

# What the CPU plug-in does for it, in the order of `Host` in emulated.h.
_OF_CPU = ("drop_copies", "may_write", "promise", "withdraw", "fail", "wait_also", "redirect")


class EmulatedBackend(Backend):
    """Emulated devices, as many as `ONEFLOW_ACCEL_EMULATED_DEVICES` says or the processes of this
    node need, each with `ONEFLOW_ACCEL_EMULATED_MEMORY`. `memory_allocated()` is what OneFlow's
    allocator has taken of the current one."""

    name: ClassVar[str] = "emulated"
    # The CPU's, to which it delegates.
    collective_backend: ClassVar[str] = CpuBackend.collective_backend
    kernels: ClassVar[str | None] = CpuBackend.name
    _lacks: ClassVar[Mapping[str, str]] = {
        "host_memory": "an emulated device has memory of its own"
    }

    def __init__(self) -> None:
        super().__init__()
        self._cpu = CpuBackend()

    def prepare(self) -> None:
        super().prepare()
        self._cpu.prepare()

    def activate(self) -> None:
        super().activate()
        state = plugin.state()
        if not state.loaded:
            raise DeviceUnavailableError(
                f"device '{self.name}' cannot be used: it delegates to the CPU plug-in, which is "
                f"not loaded: {state.reason}"
            )
        _load(self.device_count())

    def device_count(self) -> int:
        return settings.EMULATED_DEVICES.get() or self._cpu.device_count()

    def empty_cache(self) -> None:
        super().empty_cache()
        plugin.release_memory()

    def max_memory_allocated(self) -> int | None:
        return int(_library().oneflow_accel_emulated_peak(self.current_device()))

    def reset_peak_memory_stats(self) -> None:
        _library().oneflow_accel_emulated_reset_peak(self.current_device())

    def counters(self) -> dict[str, int]:
        """How many kernels this process has launched, copies it has made, streams and operators it
        has, by COUNTERS."""
        count = _library().oneflow_accel_emulated_counter
        return {name: int(count(number)) for number, name in enumerate(COUNTERS)}

    def properties(self) -> DeviceProperties:
        of_cpu = self._cpu.properties()
        memory = settings.EMULATED_MEMORY.get()
        other = profile.active()
        name = f"emulated on {of_cpu.name}"
        if other is not None:
            name += f", with what {other.device.name} has"
        return DeviceProperties(name, memory, of_cpu.peak_flops)

    def supported_dtypes(self) -> tuple[flow.dtype, ...]:
        return self._cpu.supported_dtypes()

    def _problems(self) -> list[str]:
        # Asked while oneflow is being imported, so that it loads nothing.
        if not _path().exists():
            return [f"its library {_path().name} is not built: run `make plugin`"]
        return []

    def _why_not(self, feature: str) -> str | None:
        reason = super()._why_not(feature)
        if reason is not None:
            return reason
        support = self._cpu.supports(feature)
        return None if support else support.reason

    def _memory_used(self) -> int:
        return int(_library().oneflow_accel_emulated_used(self.current_device()))


def _path() -> Path:
    return plugin.library_path("emulated")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_path()))
    for name in ("used", "peak", "counter"):
        function = getattr(library, f"oneflow_accel_emulated_{name}")
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return library


class _Options(ctypes.Structure):
    """In the order of `Options` in emulated.h."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("devices", "bytes", "asynchronous")),
        *((name, ctypes.c_int64) for name in ("fails_at", "lost_at")),
        *((name, ctypes.c_double) for name in ("bytes_per_second", "latency", "delay")),
        ("failing", ctypes.c_char_p),
    ]


def _options(devices: int) -> _Options:
    faults = settings.EMULATED_FAULTS.get() or {}
    failing, _, fails_at = faults.get("fail", ":0").partition(":")
    return _Options(
        devices,
        settings.EMULATED_MEMORY.get(),
        settings.EMULATED_STREAMS.get() == "asynchronous",
        int(fails_at),
        int(faults.get("lost", 0)),
        *(float(faults.get(name, 0)) for name in ("bandwidth", "latency", "delay")),
        failing.encode(),
    )


@lru_cache(maxsize=1)
def _load(devices: int) -> None:
    """Once, after the CPU plug-in, whose kernels it delegates to as well."""
    cpu = ctypes.CDLL(str(plugin.state().path))
    flow._oneflow_internal.LoadLibrary(str(_path()))
    try:
        functions = (getattr(cpu, f"oneflow_accel_{name}") for name in _OF_CPU)
        addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
        options = _options(devices)
        start = _library().oneflow_accel_emulated_start
        start.restype = ctypes.c_bool
        knows = start(ctypes.byref(options), (ctypes.c_void_p * len(_OF_CPU))(*addresses))
    except AttributeError as error:
        raise UserError(
            f"{_path()} is of other sources than the Python files beside it: run `make plugin`"
        ) from error
    if not knows:
        raise UserError(
            f"{settings.EMULATED_FAULTS.name}: oneflow has no operator {options.failing.decode()!r}"
        )
    other = profile.active()
    for name, types in {} if other is None else other.operators.items():
        if not _library().oneflow_accel_emulated_keep(name.encode(), " ".join(types).encode()):
            raise UserError(
                f"{settings.EMULATE.name}: oneflow {flow.__version__} has no operator {name!r}, or "
                f"not the types {', '.join(types)}"
            )
