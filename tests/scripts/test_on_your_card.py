"""scripts/on_your_card.sh, on the emulated device."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, child_environment
from tests.oneflow_accel.kernels.harness import needs_plugin

SCRIPT = REPOSITORY / "scripts" / "on_your_card.sh"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *map(str, arguments)],
        env=child_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.release
@needs_plugin
def test_it_goes_on_after_a_failure_and_leaves_one_report(tmp_path: Path) -> None:
    # Too little memory for ResNet18's optimizer: one step fails.
    done = run("emulated", tmp_path / "report", "--quick", ONEFLOW_ACCEL_EMULATED_MEMORY="130MiB")
    assert done.returncode == 1, done.stdout
    assert "- conformance: ok" in done.stdout
    assert "- losses: FAILED, exit code 1" in done.stdout
    assert "- llama-x1: ok" in done.stdout
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        files = {
            Path(name).name: archive.extractfile(name).read().decode()  # type: ignore[union-attr]
            for name in archive.getnames()
            if Path(name).suffix in (".md", ".json", ".log")
        }
    summary = files["summary.md"]
    assert summary.splitlines()[-1] == "Steps that failed: losses"
    assert "out of memory: " in summary
    report = json.loads(files["conformance.json"])
    assert report["device"] == "emulated"
    assert report["summary"]["fail"] == 0
    assert json.loads(files["state.json"])["selection"]["device"] == "emulated"


def test_a_device_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    done = run("emulatd", tmp_path / "report")
    assert done.returncode == 2
    assert "no device is called 'emulatd'" in done.stdout
    assert not (tmp_path / "report.tar.gz").exists()
