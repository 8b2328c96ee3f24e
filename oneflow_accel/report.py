"""The state of the device layer on this machine: what a bug report should carry.

`collect()` gathers it as JSON-able data, `render()` prints that data as tables.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

from oneflow_accel import backends, patching
from oneflow_accel.errors import DeviceUnavailableError
from oneflow_accel.kernels import plugin, registry

import oneflow as flow
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Raised when a key changes its meaning or goes away; new keys leave it alone.
SCHEMA = 1
PACKAGES = ("oneflow", "flowvision", "LiBai", "numpy", "protobuf", "onednn-cpu-gomp", "safetensors")
# Variables that change how things run here: of this package, OneFlow, OpenMP, glog, the drivers
# and the collectives.
ENVIRONMENT_PREFIXES = ("ONEFLOW_", "OMP_", "GLOG_", "CUDA_", "MLU_", "NCCL_", "CNCL_")


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
        "threads": {"cores": len(os.sched_getaffinity(0)), "plugin": state.num_threads},
        "plugin": {
            "loaded": state.loaded,
            "path": None if state.path is None else str(state.path),
            "reason": state.reason,
            "onednn_version": state.onednn_version,
            "operators": list(state.operators),
            "scratch_limit": state.scratch_limit,
            "redirections": [asdict(redirection) for redirection in state.redirections],
        },
        "operations": {
            name: [
                {
                    "implementation": i.name,
                    "backend": i.backend,
                    "dtypes": [str(d) for d in i.dtypes],
                }
                for i in operation.implementations
            ]
            for name, operation in registry.operations().items()
        },
        "patches": [
            {key: getattr(patch, key) for key in ("name", "package", "version", "state", "reason")}
            for patch in patching.status()
        ],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
    }


def render(state: dict[str, Any], console: Console) -> None:
    """Print what `collect()` returned as tables."""
    console.print(
        _table("versions", ("package", "version"), [(k, v) for k, v in state["versions"].items()])
    )
    devices = []
    for device in state["devices"]:
        devices.append(
            (device["name"], _mark(device["ok"]), _device_text(device), device["source"])
        )
    console.print(_table("devices", ("device", "state", "what", "from"), devices))
    features = [
        (feature, device["name"], _mark(answer["ok"]), answer["reason"])
        for device in state["devices"]
        for feature, answer in (device["features"] or {}).items()
    ]
    console.print(_table("features", ("feature", "device", "state", "why not"), features))
    plugin_state = state["plugin"]
    kernels = [
        ("state", "loaded" if plugin_state["loaded"] else f"not loaded: {plugin_state['reason']}"),
        ("file", plugin_state["path"]),
        ("oneDNN", plugin_state["onednn_version"]),
        (
            "threads per kernel",
            f"{state['threads']['plugin']} of {state['threads']['cores']} cores",
        ),
        ("scratch memory kept", _mebibytes(plugin_state["scratch_limit"])),
        *(
            (
                purpose,
                _mark(
                    all(i["done"] for i in plugin_state["redirections"] if i["purpose"] == purpose)
                ),
            )
            for purpose in sorted({i["purpose"] for i in plugin_state["redirections"]})
        ),
        ("operators", ", ".join(plugin_state["operators"])),
        *((f"operation {name}", _implementations(i)) for name, i in state["operations"].items()),
    ]
    console.print(_table("CPU kernel plug-in", ("", ""), kernels))
    patches = [
        (p["name"], f"{p['package']} {p['version']}", p["state"], p["reason"])
        for p in state["patches"]
    ]
    console.print(_table("patches", ("patch", "for", "state", "why"), patches))
    console.print(_table("environment", ("variable", "value"), list(state["environment"].items())))
    selection = state["selection"]
    console.print(f"Device: {selection['device'] or 'none'} ({selection['why']})", markup=False)


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


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    if not rows:
        table.add_row("none", *[""] * (len(columns) - 1))
    return table


def _mebibytes(count: int | None) -> str | None:
    return None if count is None else f"at most {count / 2**20:.0f} MiB"


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


def _implementations(implementations: list[dict[str, Any]]) -> str:
    texts = [
        f"{i['implementation']} ({i['backend']}: {', '.join(i['dtypes'])})" for i in implementations
    ]
    return ", ".join([*texts, "reference"])
