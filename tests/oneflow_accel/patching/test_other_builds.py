"""Builds of oneflow other than the release 0.9.0: which are accepted, and what is patched there.

Those for Cambricon cards are not on PyPI: their metadata stand before the installed oneflow's.
"""

from __future__ import annotations

import os
from pathlib import Path

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.series import patch_root, series_for

import pytest
from packaging.requirements import Requirement

from tests.launch import REPOSITORY, run_process

SHOW_STATE = """
import json
import oneflow_accel
from oneflow_accel import patching
from oneflow_accel.kernels import plugin
import oneflow as flow
assert flow.ones(2).sum().item() == 2.0
assert flow.nn.LayerNorm(4)(flow.ones(2, 4)).abs().max().item() == 0.0
patches = [patch.name for patch in patching.status() if patch.package == "oneflow"]
print("state", json.dumps({"patches": patches, "plugin": plugin.state().reason}))
"""


@pytest.mark.parametrize(
    ("installed", "series"),
    [
        ("0.9.0", "0.9.0"),
        ("0.9.1.dev20230103", None),
        ("0.9.1.dev20230410", None),
        ("0.9.1.dev20230411", "1.0.0"),
        ("0.9.1", "1.0.0"),
        ("1.0.0.dev20240101", "1.0.0"),
        ("1.0.0", "1.0.0"),
        ("1.0.1", None),
        ("0.8.0", None),
    ],
)
def test_which_builds_have_a_series(installed: str, series: str | None) -> None:
    assert series_for(patch_root(), "oneflow", installed) == series


def test_pip_keeps_a_build_that_has_a_series() -> None:
    lines = (REPOSITORY / "requirements" / "runtime.txt").read_text().splitlines()
    (engine,) = [Requirement(line) for line in lines if line.startswith("oneflow")]
    for build in ("0.9.0", "0.9.1.dev20230515+cpu", "0.9.1+cpu.git.0123abc", "1.0.0+cu118"):
        assert engine.specifier.contains(build, prereleases=True)
        assert series_for(patch_root(), "oneflow", build.partition("+")[0]) is not None
    assert not engine.specifier.contains("1.0.1", prereleases=True)


def test_a_series_for_several_builds_patches_each_of_them(fake) -> None:
    series = fake.add_patch().parent / "series"
    series.write_text("Builds: >=0.9, <1.2  # said why\n" + series.read_text())
    fake.set_version("1.1.dev3+cpu.git.0123abc")
    fake.install()
    assert fake.load().one() == 10


def test_builds_that_are_no_version_specifier(fake) -> None:
    series = fake.add_patch().parent / "series"
    series.write_text("Builds: newest\n" + series.read_text())
    with pytest.raises(PatchError, match=r"1\.0/series: .*newest"):
        series_for(fake.root, fake.name, "1.0")


def _with_version(folder: Path, version: str) -> dict[str, str]:
    """An environment in which the installed oneflow says that it is another build."""
    info = folder / f"oneflow-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: oneflow\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}


def test_a_newer_build_runs_without_patches_and_without_the_plugin(tmp_path: Path) -> None:
    environment = _with_version(tmp_path, "0.9.1.dev20230515+cpu")
    result = run_process(["-c", SHOW_STATE], env=environment)
    assert result.returncode == 0, result.stdout
    assert '"patches": []' in result.stdout
    assert "its kernels are written for oneflow 0.9.0" in result.stdout
    assert "such as this 0.9.1.dev20230515+cpu" in result.stdout


def test_a_build_without_a_series_is_refused_with_what_to_install(tmp_path: Path) -> None:
    result = run_process(["-c", "import oneflow_accel"], env=_with_version(tmp_path, "1.1.0"))
    assert result.returncode != 0
    assert "oneflow 1.1.0 is in" in result.stdout
    assert "oneflow==0.9.0 or oneflow<=1.0.0,>=0.9.1.dev20230411" in result.stdout
