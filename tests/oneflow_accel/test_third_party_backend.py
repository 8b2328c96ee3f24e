"""A package of somebody else adds a device through its entry point."""

from __future__ import annotations

import os
from pathlib import Path

from oneflow_accel import backends
from oneflow_accel.errors import DeviceUnavailableError

import numpy as np
import oneflow as flow
import pytest

from tests.launch import REPOSITORY, run_process
from tests.oneflow_accel.third_party import TINY, install

pytestmark = pytest.mark.usefixtures("fresh_registry")


def test_it_is_listed_and_can_be_selected_and_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, "tiny_selected", TINY)))
    assert backends.available_backends()["tiny"] is None
    assert backends.candidates()["tiny"].source == "tiny_selected 1.0"
    backend = backends.select_device("tiny")
    tensor = flow.ones(3, device=backend.device())
    np.testing.assert_array_equal((tensor + 1).numpy(), np.full(3, 2.0, np.float32))
    assert backends.current_backend().properties().name == "Tiny 1"


def test_it_can_run_the_kernels_of_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = 'name: ClassVar[str] = "tiny"'
    source = TINY.replace(named, f"{named}\n        kernels = 'cpu'")
    monkeypatch.syspath_prepend(str(install(tmp_path, "tiny_delegates", source)))
    assert backends.kernels_of("tiny") == "tiny"
    backends.select_device("tiny")
    assert backends.kernels_of("tiny") == "cpu"


def test_the_command_line_of_an_installed_package_sees_it(tmp_path: Path) -> None:
    install(tmp_path, "tiny_installed", TINY)
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    process = run_process(["-m", "oneflow_accel", "--device", "tiny"], env={"PYTHONPATH": path})
    assert process.returncode == 0, process.stdout
    assert "Device: tiny (asked for)" in process.stdout
    assert "tiny_installed 1.0" in process.stdout


BROKEN = [
    ("raise RuntimeError('no licence')", "TinyBackend", "RuntimeError: no licence"),
    ("import a_package_that_is_not_there", "TinyBackend", "ModuleNotFoundError: No module named"),
    ("TinyBackend = 1", "TinyBackend", "TypeError: 1 is not a subclass of"),
    (TINY.replace('"tiny"', '"other"'), "TinyBackend", "name is not 'tiny'"),
    (TINY, "Missing", "AttributeError"),
    (TINY.replace("def device_count", "def devices"), "TinyBackend", "abstract method"),
    (TINY.replace("return []", "raise OSError('probe')"), "TinyBackend", "OSError: probe"),
]


@pytest.mark.parametrize(("source", "attribute", "reason"), BROKEN)
def test_a_broken_one_is_listed_with_its_reason_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, attribute: str, reason: str
) -> None:
    package = f"tiny_broken_{abs(hash((source, attribute)))}"
    monkeypatch.syspath_prepend(str(install(tmp_path, package, source, attribute=attribute)))
    listed = backends.available_backends()
    assert reason in str(listed["tiny"])
    assert listed["cpu"] is None
    with pytest.raises(DeviceUnavailableError, match=r"device 'tiny' .* cannot be used"):
        backends.select_device("tiny")
    assert backends.select_device("cpu").name == "cpu"


def test_two_with_one_name_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "tiny_one", TINY)
    monkeypatch.syspath_prepend(str(install(tmp_path, "tiny_two", TINY)))
    with pytest.raises(DeviceUnavailableError, match=r"tiny_\w+ 1.0 and tiny_\w+ 1.0 both offer"):
        backends.select_device("tiny")


def test_one_with_the_name_of_a_built_in_device_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TINY.replace('"tiny"', '"cpu"')
    monkeypatch.syspath_prepend(str(install(tmp_path, "tiny_shadow", source, entry="cpu")))
    with pytest.raises(DeviceUnavailableError, match=r"oneflow-accel and tiny_shadow 1.0 both"):
        backends.select_device("cpu")
