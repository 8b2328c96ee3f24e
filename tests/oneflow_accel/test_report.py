"""`python -m oneflow_accel`: the tables, the JSON, the exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

from oneflow_accel import report
from oneflow_accel.backends import FEATURES
from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.kernels import plugin

import numpy as np
import pytest
from rich.console import Console

from tests.launch import REPOSITORY

pytestmark = pytest.mark.usefixtures("fresh_registry")

KEYS = {
    "schema",
    "versions",
    "devices",
    "selection",
    "threads",
    "plugin",
    "operations",
    "patches",
    "environment",
}


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, standard output and error apart."""
    return subprocess.run(
        [sys.executable, "-m", "oneflow_accel", *args],
        cwd=REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rendered(state: dict[str, Any]) -> str:
    text = io.StringIO()
    report.render(state, Console(file=text, width=200))
    return text.getvalue()


def test_json_of_the_command_has_the_documented_keys() -> None:
    process = run("--json", ONEFLOW_ACCEL_DEVICE="cpu")
    assert process.returncode == 0, process.stderr
    state = json.loads(process.stdout)
    assert set(state) == KEYS
    assert state["schema"] == report.SCHEMA
    assert state["versions"]["oneflow"] == "0.9.0"
    assert state["versions"]["numpy"] == np.__version__
    assert state["selection"] == {"device": "cpu", "why": "ONEFLOW_ACCEL_DEVICE=cpu"}
    assert state["environment"]["ONEFLOW_ACCEL_DEVICE"] == "cpu"
    assert set(state["threads"]) == {"cores", "plugin"}
    assert set(state["plugin"]) == {
        "loaded",
        "path",
        "reason",
        "level",
        "levels",
        "onednn_version",
        "blas",
        "allocator",
        "operators",
        "scratch_limit",
        "redirections",
    }
    devices = {device["name"]: device for device in state["devices"]}
    assert list(devices)[:3] == ["mlu", "cuda", "cpu"]
    for device in devices.values():
        assert set(device) == {"name", "source", "ok", "reason", "properties", "features"}
        assert (device["reason"] is None) == device["ok"]
    assert devices["cpu"]["ok"]
    assert set(devices["cpu"]["features"]) == set(FEATURES)
    assert set(devices["cpu"]["properties"]) == {"name", "total_memory", "peak_flops"}
    for patch in state["patches"]:
        assert set(patch) == {"name", "package", "version", "state", "reason"}


def test_device_that_cannot_be_used_exits_2_after_the_report() -> None:
    process = run("--device", "mlu", "--json")
    assert process.returncode == 2
    state = json.loads(process.stdout)
    assert state["selection"]["device"] is None
    assert "oneflow_mlu is not installed" in state["selection"]["why"]
    assert "error: device 'mlu' (asked for) cannot be used: " in process.stderr
    assert "Traceback" not in process.stderr


def test_a_device_that_fails_in_the_report_does_not_break_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def properties(self: CpuBackend) -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(CpuBackend, "properties", properties)
    state = report.collect()
    (cpu,) = (device for device in state["devices"] if device["name"] == "cpu")
    assert not cpu["ok"]
    assert cpu["reason"] == "OSError: no /proc here"
    assert "OSError: no /proc here" in rendered(state)


def test_missing_plugin_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = plugin.PluginState(False, None, "no compiler", None, 1, ())
    monkeypatch.setattr(plugin, "state", lambda: absent)
    state = report.collect()
    assert state["plugin"]["loaded"] is False
    text = rendered(state)
    assert "not loaded: no compiler" in text
    assert "it needs the CPU plug-in, which is not loaded: no compiler" in text


def test_only_variables_that_matter_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    state = report.collect()
    assert state["environment"]["OMP_NUM_THREADS"] == "7"
    assert "SECRET_TOKEN" not in state["environment"]
