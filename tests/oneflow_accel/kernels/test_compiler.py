"""Which compilers the plug-in's build takes: CMake's check on names and versions alone."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.launch import REPOSITORY

CHECK = REPOSITORY / "oneflow_accel" / "csrc" / "compiler.cmake"

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


def check(name: str, version: str) -> subprocess.CompletedProcess[str]:
    compiler = {"CXX_COMPILER_ID": name, "CXX_COMPILER_VERSION": version, "CXX_COMPILER": "/bin/c"}
    options = [f"-DCMAKE_{key}={value}" for key, value in compiler.items()]
    return subprocess.run(
        ["cmake", *options, "-P", CHECK], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("name", "version"), [("GNU", "11.3.0"), ("GNU", "12.2.0")])
def test_compiler_that_is_new_enough(name: str, version: str) -> None:
    result = check(name, version)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "version"), [("GNU", "10.2.1"), ("Clang", "14.0.6"), ("Intel", "2021.1")]
)
def test_compiler_that_is_too_old_or_unknown(name: str, version: str) -> None:
    result = check(name, version)
    assert result.returncode != 0
    text = " ".join(result.stderr.split())
    assert f"need g++ 11 or newer, and /bin/c is {name} {version}" in text
