"""Loads the C++ plug-in that registers CPU kernels in OneFlow's own kernel registry.

The plug-in has to be loaded before the first operation runs (a kernel that OneFlow has already
chosen stays chosen), so `import oneflow_accel` does it. Without the plug-in everything runs on
OneFlow's stock kernels, and one warning says so.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from oneflow_accel.errors import UserError

logger = logging.getLogger("oneflow_accel")

PLUGIN_VARIABLE = "ONEFLOW_ACCEL_PLUGIN"
THREADS_VARIABLE = "ONEFLOW_ACCEL_THREADS"
_LIBRARY_FOLDER = Path(__file__).resolve().parent.parent / "_lib"
_ONEDNN_PACKAGE = "onednn-cpu-gomp"
_ONEDNN_LIBRARY = "libdnnl.so.3"
_CPU_INFO = Path("/proc/cpuinfo")
# x86-64-v3, the least that the kernels are written and tested for.
_CPU_FLAGS = ("avx2", "fma")


@dataclass(frozen=True)
class PluginState:
    """What became of the plug-in in this process.

    Attributes:
        loaded: whether its kernels are registered.
        path: the library file, None where none was found.
        reason: why it is not loaded, None where it is.
        onednn_version: the oneDNN release that runs below it, None where it is not loaded.
        num_threads: threads that each of its kernels uses.
        operators: the OneFlow operators it has kernels for, sorted.
        fast_bfloat16: whether this CPU multiplies bfloat16 faster than float32.
    """

    loaded: bool
    path: Path | None
    reason: str | None
    onednn_version: str | None
    num_threads: int
    operators: tuple[str, ...]
    fast_bfloat16: bool = False


def library_name(oneflow_version: str) -> str:
    """File name of the plug-in for one release of oneflow: its C++ interface is not stable, so a
    library built for another release must not be loaded."""
    return f"liboneflow_accel_cpu_oneflow_{oneflow_version}.so"


def default_num_threads() -> int:
    """Threads per kernel: `ONEFLOW_ACCEL_THREADS`, else the cores this process may use divided by
    the processes on this node.

    Raises:
        UserError: the variable is not a positive whole number.
    """
    text = os.environ.get(THREADS_VARIABLE)
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{THREADS_VARIABLE}={text!r} is not a positive whole number")
        return int(text)
    from oneflow_accel.training import distributed

    return max(1, len(os.sched_getaffinity(0)) // distributed.local_world_size())


@lru_cache(maxsize=1)
def load() -> PluginState:
    """Load the plug-in once; later calls return the same state."""
    state = _load()
    if not state.loaded and state.reason is not None:
        logger.warning("CPU kernels run on stock OneFlow, which is slow: %s", state.reason)
    return state


def state() -> PluginState:
    """The state of the plug-in in this process (loads it if nothing has)."""
    return load()


def _load() -> PluginState:
    import oneflow

    threads = default_num_threads()
    version = importlib.metadata.version("oneflow")
    path = _LIBRARY_FOLDER / library_name(version)

    def absent(reason: str) -> PluginState:
        found = path if path.exists() else None
        return PluginState(False, found, reason, None, threads, ())

    switch = os.environ.get(PLUGIN_VARIABLE, "on")
    if switch not in ("on", "off"):
        raise UserError(f"{PLUGIN_VARIABLE}={switch!r} is neither 'on' nor 'off'")
    if switch == "off":
        return absent(f"switched off by {PLUGIN_VARIABLE}=off")
    if not path.exists():
        others = sorted(file.name for file in _LIBRARY_FOLDER.glob("*.so"))
        hint = f"; found only {', '.join(others)}" if others else ""
        return absent(
            f"the plug-in is not built for oneflow {version}{hint} "
            "(install a C++ compiler, Debian: apt-get install g++, then run `make plugin`)"
        )
    lacking = sorted(set(_CPU_FLAGS) - _cpu_flags())
    if lacking:
        return absent(f"this CPU has no {' and no '.join(map(str.upper, lacking))}")
    onednn = _onednn_library()
    if onednn is None:
        return absent(f"{_ONEDNN_LIBRARY} of the package {_ONEDNN_PACKAGE} is not installed")
    try:
        # Loaded first, so that the plug-in finds it by its soname wherever pip has put it.
        ctypes.CDLL(str(onednn), mode=ctypes.RTLD_GLOBAL)
        oneflow._oneflow_internal.LoadLibrary(str(path))
        library = ctypes.CDLL(str(path))
    except (OSError, oneflow._oneflow_internal.exception.Exception) as error:
        # OneFlow's own messages go on with its source lines.
        return absent(f"{path.name} cannot be loaded: {str(error).strip().splitlines()[0]}")
    library.oneflow_accel_onednn_version.restype = ctypes.c_char_p
    library.oneflow_accel_operators.restype = ctypes.c_char_p
    library.oneflow_accel_set_num_threads(threads)
    operators = library.oneflow_accel_operators().decode().split()
    return PluginState(
        loaded=True,
        path=path,
        reason=None,
        onednn_version=library.oneflow_accel_onednn_version().decode(),
        num_threads=threads,
        operators=tuple(operators),
        fast_bfloat16=bool(library.oneflow_accel_fast_bfloat16()),
    )


def _cpu_flags() -> set[str]:
    for line in _CPU_INFO.read_text().splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return set(flags.split())
    return set()


def _onednn_library() -> Path | None:
    try:
        files = importlib.metadata.files(_ONEDNN_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _ONEDNN_LIBRARY:
            return Path(str(file.locate())).resolve()
    return None
