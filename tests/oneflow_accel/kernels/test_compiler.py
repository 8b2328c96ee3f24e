"""Which compilers the plug-in's build takes, and what it needs of a CPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from oneflow_accel.kernels import plugin

import pytest

from tests.launch import REPOSITORY

CHECK = REPOSITORY / "oneflow_accel" / "csrc" / "compiler.cmake"
# Macros that g++ has where it may use what Linux calls something else.
_LINUX = {"BMI": "bmi1", "LZCNT": "abm"}
# What every CPU with AVX2 has, and its operating system.
_WITH_AVX2 = {"avx", "xsave", "crc32"}

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def check(name: str, version: str, compiler: str | Path = "/bin/c") -> tuple[int, str]:
    values = {"CXX_COMPILER_ID": name, "CXX_COMPILER_VERSION": version, "CXX_COMPILER": compiler}
    options = [f"-DCMAKE_{key}={value}" for key, value in values.items()]
    result = subprocess.run(
        ["cmake", *options, "-P", CHECK], capture_output=True, text=True, timeout=60, check=False
    )
    return result.returncode, " ".join(result.stderr.split())


@needs_cmake
@needs_compiler
def test_compiler_that_is_new_enough() -> None:
    for version in ("11.3.0", "12.2.0"):
        assert check("GNU", version, shutil.which("g++") or "") == (0, "")


@needs_cmake
@pytest.mark.parametrize(
    ("name", "version"), [("GNU", "10.2.1"), ("Clang", "14.0.6"), ("Intel", "2021.1")]
)
def test_compiler_that_is_too_old_or_unknown(name: str, version: str) -> None:
    code, text = check(name, version)
    assert code != 0
    assert f"need g++ 11 or newer, and /bin/c is {name} {version}" in text


@needs_cmake
def test_assembler_that_is_too_old(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\ngrep -q tdpbf16ps && exit 1\n")
    compiler.chmod(0o755)
    code, text = check("GNU", "11.3.0", compiler)
    assert code != 0
    assert "need the assembler of binutils 2.35 or newer" in text


@needs_compiler
@pytest.mark.parametrize("level", plugin.LEVELS[:2], ids=lambda level: level.name)
def test_a_cpu_of_a_level_has_what_its_library_uses(level: plugin.Level) -> None:
    options = re.search(rf"options_{level.library} (-march=\S+)\)", CMAKE.read_text())

    def may_use(option: str) -> set[str]:
        command = ["g++", option, "-dM", "-E", "-x", "c", "/dev/null"]
        macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = re.findall(r"^#define __([A-Z0-9]+)__ 1$", macros, re.MULTILINE)
        return {_LINUX.get(name, name.lower()) for name in names}

    known = may_use("-march=sapphirerapids") - may_use("-march=x86-64-v2")
    needed = may_use(options[1]) & known - _WITH_AVX2
    below = plugin.LEVELS[: plugin.LEVELS.index(level) + 1]
    assert needed == {flag for one in below for flag in one.flags}


CMAKE = REPOSITORY / "CMakeLists.txt"
