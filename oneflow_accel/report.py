"""The state of the device layer on this machine: what a bug report should carry.

`collect()` gathers it as JSON-able data, `render()` prints that data as tables. `kernel_choices()`
says which CPU kernel an operator gets here, and why: from OneFlow's own kernel registry, asked by
the plug-in (csrc/common/registry.cpp), and not from a list that could grow old.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oneflow_accel import allocator, backends, machine, patching
from oneflow_accel.errors import DeviceUnavailableError, UserError, nearest
from oneflow_accel.kernels import plugin, registry

import oneflow as flow
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Raised when a key changes its meaning or goes away; new keys leave it alone.
SCHEMA = 1
PACKAGES = (
    *("oneflow", "flowvision", "LiBai", "numpy", "protobuf", "onednn-cpu-gomp", "mkl"),
    *("safetensors", allocator.PACKAGE),
)
# Variables that change how things run here: of this package, OneFlow, OpenMP, oneDNN, glog, the
# drivers and the collectives.
ENVIRONMENT_PREFIXES = (
    *("ONEFLOW_", "OMP_", "GOMP_", "MKL_", "ONEDNN_", "GLOG_", "CUDA_", "MLU_", "NCCL_", "CNCL_"),
)
# Those of `PluginState` that are shown as they are.
_PLUGIN_KEYS = ("loaded", "reason", "level", "onednn_version", "blas", "scratch_limit")


def collect(device: str | None = None) -> dict[str, Any]:
    """The state as JSON-able data; chooses no device and runs no operator.

    What is not as its name says: versions are null where a package is not installed; a device has a
    null reason where it is ok, and null properties and features where it is not; selection.device
    is null where none can be used, and why says why; operations list their implementations in order
    of preference; environment has the variables that begin with one of ENVIRONMENT_PREFIXES.
    """
    state = plugin.state()
    return {
        "schema": SCHEMA,
        "versions": _versions(),
        "devices": [_device(candidate) for candidate in backends.candidates().values()],
        "selection": _selection(device),
        "threads": {"cores": machine.cores(), "plugin": state.num_threads},
        "plugin": {
            **{key: getattr(state, key) for key in _PLUGIN_KEYS},
            "path": None if state.path is None else str(state.path),
            "levels": [level.name for level in plugin.cpu_levels()],
            "allocator": allocator.in_use(),
            "operators": list(state.operators),
            "redirections": [asdict(redirection) for redirection in state.redirections],
        },
        "operations": {
            name: [
                {"implementation": i.name, "backend": i.backend, "dtypes": list(map(str, i.dtypes))}
                for i in operation.implementations
            ]
            for name, operation in registry.operations().items()
        },
        "patches": [asdict(patch) for patch in patching.status()],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
    }


def render(state: dict[str, Any], console: Console) -> None:
    """Print what `collect()` returned as tables."""
    devices, of_plugin, threads = state["devices"], state["plugin"], state["threads"]
    given: dict[str, bool] = {}
    for each in of_plugin["redirections"]:
        given[each["purpose"]] = given.get(each["purpose"], True) and each["done"]
    scratch = of_plugin["scratch_limit"]
    kernels = {
        "state": "loaded" if of_plugin["loaded"] else f"not loaded: {of_plugin['reason']}",
        "file": of_plugin["path"],
        "instruction sets": f"{of_plugin['level']} of {', '.join(of_plugin['levels']) or 'none'}",
        "oneDNN": of_plugin["onednn_version"],
        "float32 matrix products": of_plugin["blas"],
        "C++ objects": of_plugin["allocator"],
        "threads per kernel": f"{threads['plugin']} of {threads['cores']} cores",
        "scratch memory kept": None if scratch is None else f"at most {scratch / 2**20:.0f} MiB",
        **{purpose: _mark(done) for purpose, done in sorted(given.items())},
        "operators": ", ".join(of_plugin["operators"]),
        **{f"operation {name}": _implementations(i) for name, i in state["operations"].items()},
    }
    features = [
        (feature, device["name"], _mark(answer["ok"]), answer["reason"])
        for device in devices
        for feature, answer in (device["features"] or {}).items()
    ]
    tables: list[tuple[str, tuple[str, ...], Iterable[Sequence[Any]]]] = [
        ("versions", ("package", "version"), state["versions"].items()),
        (
            *("devices", ("device", "state", "what", "from")),
            [(d["name"], _mark(d["ok"]), _device_text(d), d["source"]) for d in devices],
        ),
        ("features", ("feature", "device", "state", "why not"), features),
        ("CPU kernel plug-in", ("", ""), kernels.items()),
        (
            *("patches", ("patch", "for", "state", "why")),
            [
                (p["name"], f"{p['package']} {p['version']}", p["state"], p["reason"])
                for p in state["patches"]
            ],
        ),
        ("environment", ("variable", "value"), state["environment"].items()),
    ]
    for title, columns, rows in tables:
        console.print(table(title, columns, rows))
    selection = state["selection"]
    console.print(f"Device: {selection['device'] or 'none'} ({selection['why']})", markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of plain texts, None for an empty one."""
    made = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    if not made.rows:
        made.add_row("none", *[""] * (len(columns) - 1))
    return made


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "oneflow_commit": flow.version.__git_commit__,
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _device(candidate: backends.Candidate) -> dict[str, Any]:
    backend = candidate.backend if candidate.reason is None else None
    reason, properties, features = candidate.reason, None, None
    if backend is not None:
        # A report has to come out whatever one device's code, or another package's, raises.
        try:
            properties = asdict(backend.properties())
            features = {feature: asdict(backend.supports(feature)) for feature in backends.FEATURES}
        except Exception as error:
            reason, properties = f"{type(error).__name__}: {error}", None
    return {
        "name": candidate.name,
        "source": candidate.source,
        "ok": reason is None,
        "reason": reason,
        "properties": properties,
        "features": features,
    }


def _selection(device: str | None) -> dict[str, str | None]:
    try:
        selection = backends.resolve(device)
    except DeviceUnavailableError as error:
        return {"device": None, "why": str(error)}
    return {"device": selection.backend.name, "why": selection.why}


def _mark(ok: bool) -> str:
    return "PASS" if ok else "FAIL"


def _device_text(device: dict[str, Any]) -> str:
    if not device["ok"]:
        return str(device["reason"])
    properties = device["properties"]
    parts = [properties["name"]]
    if properties["total_memory"] is not None:
        parts.append(f"{properties['total_memory'] / 2**30:.1f} GiB")
    for dtype, peak in properties["peak_flops"].items():
        if peak is not None:
            parts.append(f"{dtype} {peak / 1e12:g} TFLOP/s")
    return ", ".join(parts)


def _implementations(found: list[dict[str, Any]]) -> str:
    texts = (f"{i['implementation']} ({i['backend']}: {', '.join(i['dtypes'])})" for i in found)
    return ", ".join([*texts, "reference"])


# Numbers of OneFlow's DataType (oneflow/core/common/data_type.proto).
_DATA_TYPES = {"float32": 2, "float64": 3, "bfloat16": 11}
# What registry.cpp answers. It cannot tell where OneFlow's predicates ask for attributes; the
# plug-in has float32 of everything that it has.
_NONE, _STOCK, _IN_PLACE, _ALONE, _UNKNOWN = 0, 1, 2, 3, -1
_STUBS = ("layer_norm", "layer_norm_grad", "layer_norm_param_grad")


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of one operator: by dtype "plug-in", "oneflow", "none", or "?" where it depends
    on more; `why` is one sentence about float32."""

    operator: str
    kernels: dict[str, str]
    why: str


def kernel_choices(operators: Sequence[str] = ()) -> list[KernelChoice]:
    """The kernels of some operators, of all that the plug-in has where none is named. UserError if
    the plug-in, which asks the registry, is not loaded, or there is no such operator."""
    state = plugin.state()
    if not state.loaded:
        raise UserError(
            f"every operator runs on OneFlow's own kernel, if it has one: {state.reason}"
        )
    library = ctypes.CDLL(str(state.path))
    library.oneflow_accel_all_operators.restype = ctypes.c_char_p
    known = library.oneflow_accel_all_operators().decode().split()
    for name in operators:
        if name not in known:
            near = ", ".join(nearest(name, known, most=3, cutoff=0.5)) or "none"
            raise UserError(f"OneFlow has no operator '{name}'; names like it: {near}")
    choices = []
    for name in operators or state.operators:
        answers = {
            dtype: library.oneflow_accel_which_kernel(name.encode(), number)
            for dtype, number in _DATA_TYPES.items()
        }
        listed = name in state.operators
        kernels = {dtype: _kernel(answer, dtype, listed) for dtype, answer in answers.items()}
        choices.append(KernelChoice(name, kernels, _why(name, answers["float32"], listed)))
    return choices


def _kernel(answer: int, dtype: str, listed: bool) -> str:
    if answer == _UNKNOWN:
        return "plug-in" if listed and dtype == "float32" else "?"
    if answer == _STOCK and listed and dtype == "float32":
        return "?"
    return {_NONE: "none", _STOCK: "oneflow", _IN_PLACE: "plug-in", _ALONE: "plug-in"}[answer]


def _why(operator: str, answer: int, listed: bool) -> str:
    if operator in _STUBS and listed:
        return "OneFlow's own ends the process"
    if answer == _UNKNOWN:
        has = "the plug-in's has the higher priority" if listed else "the plug-in has none"
        return f"{has}; OneFlow's own depends on the operator's attributes"
    if answer == _STOCK and listed:
        return "it depends on the dtypes of inputs and outputs, which are not all the same"
    return {
        _NONE: "neither the plug-in nor OneFlow has a CPU kernel",
        _STOCK: "the plug-in has none",
        _IN_PLACE: "the plug-in's has the higher priority",
        _ALONE: "OneFlow has no CPU kernel of its own",
    }[answer]


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help="default: all that the plug-in has"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def list_kernels(args: argparse.Namespace, width: int | None) -> int:
    """Print the choices; returns the exit code."""
    choices = kernel_choices(args.operators)
    if args.json:
        print(json.dumps([asdict(choice) for choice in choices], indent=2))
        return 0
    console = Console(width=width, file=sys.stdout)
    rows = [(choice.operator, *choice.kernels.values(), choice.why) for choice in choices]
    columns = ("operator", *_DATA_TYPES, "why (float32)")
    console.print(table("CPU kernels by operator", columns, rows))
    if not args.operators:
        for name, operation in registry.operations().items():
            names = [i.describe() for i in operation.implementations]
            console.print(f"operation {name}: {', '.join([*names, 'reference'])}", markup=False)
    return 0
