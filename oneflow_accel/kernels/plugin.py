"""Loads the C++ plug-in that registers CPU kernels in OneFlow's own kernel registry.

The plug-in has to be loaded before the first operation runs (a kernel that OneFlow has already
chosen stays chosen), so `import oneflow_accel` does it. Without the plug-in everything runs on
OneFlow's stock kernels, and one warning says so.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from oneflow_accel import distributed, launched, machine, settings
from oneflow_accel.errors import UserError
from oneflow_accel.machine import installed_file

import oneflow as flow

logger = logging.getLogger("oneflow_accel")

# The release whose C++ interface csrc is written against.
WRITTEN_FOR = "0.9.0"
_LIBRARY_FOLDER = Path(__file__).resolve().parent.parent / "_lib"
_ONEDNN_PACKAGE = "onednn-cpu-gomp"
_ONEDNN_LIBRARY = "libdnnl.so.3"
_MKL_PACKAGE = "mkl"
_MKL_LIBRARY = "libmkl_rt.so*"
# Where MKL was measured to be slower than oneDNN, it is not taken unless it is asked for: AMD.
_MKL_VENDOR = "GenuineIntel"
_CPU_INFO = Path("/proc/cpuinfo")
# How often a thread looks before it sleeps. libgomp's own 300,000 times are 5 ms in which it keeps
# its core from whoever needs it, first of all from the rest of its team (benchmarks/contention.py).
_SPINS = "1000"


@dataclass(frozen=True)
class Level:
    """A level of instruction sets: the library of kernels that is built for it, the flags of
    /proc/cpuinfo that a CPU needs beside those of the levels below, and the most that oneDNN may
    use where it is asked for by name (ONEDNN_MAX_CPU_ISA)."""

    name: str
    library: str
    flags: tuple[str, ...]
    onednn: str


# The least first: x86-64-v3 and -v4, which CMakeLists.txt compiles for, and two more. Linux calls
# LZCNT abm.
_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = (
    Level("avx2", "avx2", _V3, "AVX2"),
    Level("avx512", "avx512", _V4, "AVX512_CORE_VNNI"),
    Level("avx512_bf16", "avx512", ("avx512_bf16",), "AVX512_CORE_FP16"),
    Level("amx", "avx512", ("amx_tile", "amx_bf16"), "ALL"),
)
# What the functions of OneFlow's that the plug-in replaces are replaced for, each by a part of its
# name.
_REDIRECTED_FOR = {
    "the scheduler's waiting leaves the cores to the kernels": ("sched_yield", "Notifier"),
    "outputs of an nn.Graph share memory": ("IntraJobMemSharing", "BlobC1"),
    "a small nn.Graph that ends early does not break the heap": ("NNGraph",),
    "an error inside a kernel is raised in Python": ("WaitUntilCntEqualZero",),
    "synchronizing raises the errors inside kernels": ("CurrentRankSync",),
    "autocast computes in bfloat16 on CPUs": (
        *("MakeAutoCastMeta", "IsFloatingDataType", "promoteTypes"),
    ),
    "a lack of memory is raised in Python": (
        *("aligned_alloc", "memset", "memcpy", "RuntimeError"),
    ),
}


@dataclass(frozen=True)
class Redirection:
    """A function of OneFlow's, called by the library with this in its path, that the plug-in puts
    one of its own in place of; what for, and whether it could."""

    function: str
    library: str
    purpose: str
    done: bool


@dataclass(frozen=True)
class PluginState:
    """What became of the plug-in in this process. `came_late` says whether oneflow had begun before
    it was loaded: an operation had run, or a fork. `scratch_limit` is how many bytes of scratch
    memory the kernels keep at most between calls, `blas` what multiplies float32 matrices: "mkl" or
    "onednn"."""

    loaded: bool
    path: Path | None
    reason: str | None
    onednn_version: str | None
    num_threads: int
    operators: tuple[str, ...]
    fast_bfloat16: bool = False
    came_late: bool = False
    redirections: tuple[Redirection, ...] = ()
    scratch_limit: int | None = None
    level: str | None = None
    blas: str | None = None


def library_name(oneflow_version: str, part: str) -> str:
    """File name of a library, "cpu_LEVEL" or "emulated", for one release of oneflow: its C++
    interface is not stable, so a library built for another release must not be loaded."""
    return f"liboneflow_accel_{part}_oneflow_{oneflow_version}.so"


def library_path(part: str) -> Path:
    """The file of a library for the installed oneflow."""
    return _LIBRARY_FOLDER / library_name(importlib.metadata.version("oneflow"), part)


def cpu_levels() -> tuple[Level, ...]:
    """Those of LEVELS that this CPU has, the least first."""
    flags = _cpu_flags()
    has_all = itertools.takewhile(lambda level: flags.issuperset(level.flags), LEVELS)
    return tuple(has_all)


def _chosen_level() -> Level | None:
    """The level to load: `ONEFLOW_ACCEL_ISA` (UserError if the CPU lacks it), else the best that
    the CPU has, if it has one."""
    available = {level.name: level for level in cpu_levels()}
    name = settings.ISA.get()
    if name is None:
        return next(reversed(available.values()), None)
    if name not in available:
        has = ", ".join(available) or "none of them"
        raise UserError(f"{settings.ISA.name}={name!r}, and this CPU has {has}")
    # Of the same level, unless the user says otherwise; MKL reads it at its first product.
    os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", available[name].library.upper())
    return available[name]


def default_num_threads() -> int:
    """Threads per kernel: `ONEFLOW_ACCEL_THREADS`, else the cores this process may use divided by
    the processes on this node."""
    return settings.THREADS.get() or max(1, machine.cores() // distributed.local_world_size())


def scratch_limit() -> int:
    """Bytes of scratch memory that the kernels of this process may keep between calls:
    `ONEFLOW_ACCEL_SCRATCH`, a part of the memory there is, shared by the processes on this node."""
    return int(settings.SCRATCH.get() * machine.memory()) // distributed.local_world_size()


def mkl_library() -> Path | None:
    """MKL's library, where it is installed."""
    return installed_file(_MKL_PACKAGE, _MKL_LIBRARY)


def _chosen_mkl() -> Path | None:
    """MKL, if it is to multiply float32 matrices in place of oneDNN: `ONEFLOW_ACCEL_BLAS` says so
    (UserError if MKL is not installed), else it is on Intel's processors where it is installed."""
    choice = settings.BLAS.get()
    if choice == "onednn" or (choice is None and _cpu_info("vendor_id") != _MKL_VENDOR):
        return None
    found = mkl_library()
    if found is None and choice == "mkl":
        raise UserError(
            f"{settings.BLAS.name}='mkl', and the package {_MKL_PACKAGE} is not installed: "
            "pip install 'oneflow-accel[mkl]', or pip install mkl"
        )
    return found


def release_memory() -> None:
    """Give back what kernels keep between calls: scratch memory, and copies of weights in layouts
    of their own. Nothing is given back while a kernel runs."""
    path = state().path
    if state().loaded:
        library = ctypes.CDLL(str(path))
        library.oneflow_accel_release_scratch()
        library.oneflow_accel_release_all_weights()


@lru_cache(maxsize=1)
def load() -> PluginState:
    """Load the plug-in once; later calls return the same state."""
    state = _load()
    if not state.loaded and state.reason is not None:
        logger.warning("CPU kernels run on stock OneFlow, which is slow: %s", state.reason)
    for purpose in sorted({item.purpose for item in state.redirections if not item.done}):
        logger.warning("not given with this build of oneflow: %s", purpose)
    return state


def state() -> PluginState:
    """The state of the plug-in in this process (loads it if nothing has)."""
    return load()


def _load() -> PluginState:
    threads = default_num_threads()
    limit = scratch_limit()
    version = importlib.metadata.version("oneflow")
    off = settings.PLUGIN.get() == "off"
    level = None if off else _chosen_level()
    mkl = None if off else _chosen_mkl()
    path = library_path(f"cpu_{(level or LEVELS[0]).library}")

    def absent(reason: str) -> PluginState:
        found = path if path.exists() else None
        return PluginState(False, found, reason, None, threads, ())

    if off:
        return absent(f"switched off by {settings.PLUGIN.name}=off")
    if version.partition("+")[0] != WRITTEN_FOR:
        return absent(
            f"its kernels are written for oneflow {WRITTEN_FOR}, whose C++ interface other builds, "
            f"such as this {version}, do not share"
        )
    if not path.exists():
        others = sorted(file.name for file in _LIBRARY_FOLDER.glob("*.so"))
        hint = f"; found only {', '.join(others)}" if others else ""
        advice = "install a C++ compiler, Debian: apt-get install g++, then run `make plugin`"
        with suppress(OSError):
            # Written by setup.py.
            advice = (_LIBRARY_FOLDER / "not_built.txt").read_text()
        return absent(f"the plug-in is not built for oneflow {version}{hint}: {advice}")
    if level is None:
        lacking = sorted(set(LEVELS[0].flags) - _cpu_flags())
        return absent(f"this CPU has no {' and no '.join(map(str.upper, lacking))}")
    onednn = installed_file(_ONEDNN_PACKAGE, _ONEDNN_LIBRARY)
    if onednn is None:
        return absent(f"{_ONEDNN_LIBRARY} of the package {_ONEDNN_PACKAGE} is not installed")
    with _told_to_libraries(level):
        try:
            # Loaded first, so that the plug-in finds it by its soname wherever pip has put it.
            ctypes.CDLL(str(onednn), mode=ctypes.RTLD_GLOBAL)
            flow._oneflow_internal.LoadLibrary(str(path))
            library = ctypes.CDLL(str(path))
        except (OSError, flow._oneflow_internal.exception.Exception) as error:
            # OneFlow's own messages go on with its source lines.
            return absent(f"{path.name} cannot be loaded: {str(error).strip().splitlines()[0]}")
        try:
            return _started(library, path, threads, limit, level, mkl)
        except AttributeError as error:
            # Its kernels are in OneFlow's registry now: this process cannot go on without it.
            raise UserError(
                f"{path} is of other sources than the Python files beside it: run `make plugin`"
            ) from error


@contextmanager
def _told_to_libraries(level: Level | None) -> Iterator[None]:
    """Inside, what libraries that are loaded read from the environment, where the user does not say
    otherwise. Afterwards it is as before: programs that this one starts may want another level."""
    told = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": _SPINS}
    if level is not None and settings.ISA.get() is not None:
        told["ONEDNN_MAX_CPU_ISA"] = level.onednn
    told = {name: text for name, text in told.items() if name not in os.environ}
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def _started(
    library: ctypes.CDLL, path: Path, threads: int, limit: int, level: Level, mkl: Path | None
) -> PluginState:
    for name in ("onednn_version", "operators", "redirections", "use_mkl"):
        getattr(library, f"oneflow_accel_{name}").restype = ctypes.c_char_p
    library.oneflow_accel_guard_kernels()
    library.oneflow_accel_set_num_threads(threads)
    streams = library.oneflow_accel_streams()
    library.oneflow_accel_set_scratch_limit(ctypes.c_int64(limit))
    for group in machine.limits()[:1]:
        told = (str(group.usage), str(group.statistics), *group.droppable)
        words = (text.encode() for text in told)
        library.oneflow_accel_limit_memory(ctypes.c_int64(group.bytes), *words)
    reason = None if mkl is None else library.oneflow_accel_use_mkl(str(mkl).encode())
    if reason is not None:
        message = f"{mkl} cannot be used: {reason.decode()}"
        if settings.BLAS.get() is not None:
            raise UserError(f"{settings.BLAS.name}='mkl', and {message}")
        logger.warning("%s; oneDNN multiplies in its place", message)
        mkl = None
    bfloat16 = library.oneflow_accel_bfloat16_products()
    # Not that of /proc/cpuinfo: a system may refuse the tiles that the CPU has.
    in_use = (level.library, "avx512_bf16", "amx")[bfloat16]
    asked = settings.ISA.get()
    if asked in ("avx512_bf16", "amx")[bfloat16:]:
        raise UserError(
            f"{settings.ISA.name}={asked!r}, and this process gets {in_use} only: the system "
            "refuses AMX (arch_prctl), or ONEDNN_MAX_CPU_ISA is lower"
        )
    # Registered after OneFlow's own, so they run before, in the other order.
    atexit.register(_leave_peers, library)
    atexit.register(library.oneflow_accel_program_ends)
    return PluginState(
        loaded=True,
        path=path,
        reason=None,
        onednn_version=library.oneflow_accel_onednn_version().decode(),
        num_threads=threads,
        operators=tuple(library.oneflow_accel_operators().decode().split()),
        fast_bfloat16=bfloat16 > 0,
        came_late=streams > 0,
        redirections=_redirections(library.oneflow_accel_redirections().decode()),
        scratch_limit=limit,
        level=in_use,
        blas="onednn" if mkl is None else "mkl",
    )


def _leave_peers(library: ctypes.CDLL) -> None:
    """The other processes of the job need not wait for this one any more; where one of them has
    gone, OneFlow's end would wait for it."""
    if library.oneflow_accel_leave_peers():
        launched.end("", 1)


def _redirections(text: str) -> tuple[Redirection, ...]:
    rows = []
    for line in sorted(text.splitlines()):
        library, function, done = line.split()
        purpose = next(
            why for why, names in _REDIRECTED_FOR.items() if any(map(function.__contains__, names))
        )
        rows.append(Redirection(function, library.strip("/"), purpose, done == "1"))
    return tuple(rows)


def _cpu_flags() -> set[str]:
    return set(_cpu_info("flags").split())


def _cpu_info(key: str) -> str:
    for line in _CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
