"""`python -m oneflow_accel conformance`: right devices pass, and wrong ones are found out."""

from __future__ import annotations

import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from oneflow_accel import conformance
from oneflow_accel.backends import FEATURES
from oneflow_accel.conformance.checks import CHECKS, STEPS

import pytest

from tests.launch import REPOSITORY, run_process
from tests.oneflow_accel.kernels.harness import needs_plugin
from tests.oneflow_accel.third_party import TINY, install

REPORTS = REPOSITORY / "docs" / "reports"
SMALL = {"ONEFLOW_ACCEL_EMULATED_MEMORY": "1GiB", "ONEFLOW_ACCEL_EMULATED_DEVICES": "2"}


def run(
    folder: Path, device: str, *options: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command in a process of its own, and its report."""
    path = folder / f"{device}.json"
    command = ["-m", "oneflow_accel", "conformance", "--device", device, "--json", path, *options]
    done = run_process(command, env=environment, timeout=300)
    return done, json.loads(path.read_text()) if path.exists() else {}


@lru_cache(maxsize=2)
def whole(folder: Path, device: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    return run(folder, device, **SMALL)


@pytest.fixture(params=["cpu", pytest.param("emulated", marks=needs_plugin)])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    return whole(tmp_path_factory.getbasetemp(), request.param)


def status(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def test_a_device_that_works_passes(found: Any) -> None:
    done, report = found
    assert [check for check in report["checks"] if check["status"] == "fail"] == []
    assert done.returncode == 0, done.stdout
    assert conformance.summary_text(report) == done.stdout.splitlines()[-1]


def test_the_report_has_all_that_a_bug_report_carries(found: Any) -> None:
    _, report = found
    names = [(check["step"], check["name"]) for check in report["checks"]]
    assert names == [(check.step, check.name) for check in CHECKS]
    assert sum(report["summary"].values()) == len(CHECKS)
    assert {"python", "oneflow", "oneflow_commit"} <= set(report["versions"])
    assert report["properties"]["name"]
    assert len(report["date"]) == len("2026-11-26")
    for check in report["checks"]:
        assert check["seconds"] >= 0
        assert bool(check["reason"]) == (check["status"] != "pass"), check
    skipped = [check for check in report["checks"] if check["status"] == "not supported"]
    assert all(check["feature"] in (*FEATURES, None) for check in skipped)


def test_every_feature_has_a_check_and_every_step_one() -> None:
    assert {check.needs for check in CHECKS} == {*FEATURES, None}
    steps = [check.step for check in CHECKS]
    assert list(dict.fromkeys(steps)) == list(STEPS)
    assert len({(check.step, check.name) for check in CHECKS}) == len(CHECKS)


# A device that claims all features, counts no memory, and ends the process where it is seeded.
LIAR = f"""{TINY}
        def manual_seed(self, seed: int) -> None:
            import ctypes

            print("error: no generator", flush=True)
            ctypes.CDLL(None).abort()

        _lacks = {{"uniform_random": "this card has none"}}
"""


def test_a_device_that_lies_fails_and_a_check_that_ends_its_process_is_one_failure(
    tmp_path: Path,
) -> None:
    install(tmp_path, "tiny_liar", LIAR)
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    done, report = run(tmp_path, "tiny", "--only", "memory", "random", PYTHONPATH=path)
    assert done.returncode == 1, done.stdout
    assert status(report) == {
        "taken and written": "pass",
        "counted and given back": "fail",
        "running out is an error with sizes": "fail",
        "the host can read it": "pass",
        "normal": "fail",
        "uniform": "not supported",
        "dropout": "pass",
    }
    reasons = {check["name"]: check["reason"] for check in report["checks"]}
    assert "of 96 MiB that were taken 0 B are counted" in reasons["counted and given back"]
    assert reasons["normal"] == "its process ended (SIGABRT): error: no generator"
    assert reasons["uniform"] == "this card has none"
    assert done.stdout.splitlines()[-1] == "3 pass, 3 fail, 1 not supported"


def test_a_feature_that_is_there_though_the_backend_says_no_is_told(tmp_path: Path) -> None:
    lacks = f'{TINY}\n        _lacks = {{"graph": "it has none"}}\n'
    install(tmp_path, "tiny_modest", lacks)
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    done, report = run(tmp_path, "tiny", "--only", "graph", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert report["checks"][0]["reason"] == "it has none (but the check of it passes)"


def test_a_device_that_cannot_be_used_is_said_in_a_sentence(tmp_path: Path) -> None:
    done, report = run(tmp_path, "emulatd")
    assert (done.returncode, report) == (2, {})
    assert "no device is called 'emulatd'" in done.stdout
    install(tmp_path, "tiny_dead", f"{TINY}\n        def activate(self):\n            1 / 0\n")
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    done, report = run(tmp_path, "tiny", "--only", "device", PYTHONPATH=path)
    assert (done.returncode, report) == (2, {})
    assert "division by zero" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_readmes_tables_say_what_the_reports_say(path: Path) -> None:
    report = json.loads(path.read_text())
    row = f"[{conformance.summary_text(report)}](docs/reports/{path.name})"
    for name in ("README.md", "README_zh-CN.md"):
        assert row in (REPOSITORY / name).read_text(), f"{name} is to say {row}"
