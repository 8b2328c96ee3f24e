"""`make plugin` and `pip install .` where the kernels cannot be compiled, and where they can after
all. CMake, ninja and the compiler are real and the sources two files of a line; pip, which would
change the environment that the tests run in, is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, run_process

COMPILER = shutil.which(os.environ.get("CXX") or "c++")
LIBRARY = "oneflow_accel/_lib/liboneflow_accel_cpu_avx2_oneflow_0.9.0.so"
NOT_BUILT = "oneflow_accel/_lib/not_built.txt"
# In CMakeLists.txt's words, too.
NEEDED = "g++ 11 or newer"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

# Says what it is asked for; but for setup.py it does nothing.
PYTHON = f"""#!/bin/sh
case "$1" in
  setup.py) exec {sys.executable} "$@";;
  *) echo "python $*, plug-in $ONEFLOW_ACCEL_PLUGIN";;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.root = folder
        folder.mkdir(exist_ok=True)
        for name in ("Makefile", "pyproject.toml", "setup.py", "CMakeLists.txt"):
            shutil.copy(REPOSITORY / name, folder)
        shutil.copytree(REPOSITORY / "requirements", folder / "requirements")
        (folder / "patches").mkdir()
        self.write("oneflow_accel/__init__.py", "")
        self.write("oneflow_accel/csrc/common/oneflow.h", "")
        shutil.copy(REPOSITORY / "oneflow_accel/csrc/compiler.cmake", folder / "oneflow_accel/csrc")
        self.write("oneflow_accel/csrc/good/good.cpp", "int good() { return 1; }\n")
        self.write("oneflow_accel/csrc/other/other.cpp", "int other() { return 2; }\n")
        self.write("oneflow_accel/emulated/device.cpp", "int device() { return 3; }\n")
        command = self.write(".venv/bin/python", PYTHON)
        command.chmod(0o755)
        for program in ("cmake", "ninja"):
            (folder / ".venv" / "bin" / program).symlink_to(Path(sys.executable).parent / program)
        for stamp in (".python", ".requirements"):
            self.write(f".venv/{stamp}", "")

    def write(self, name: str, text: str) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def make(self, *goals: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("make", *goals, env=env)

    def setup(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "setup.py", "--quiet", *arguments, env=env)

    def run(self, *command: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        # As typed by a user, also when the tests themselves run under make.
        of_make = ("CXX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        clean = {k: v for k, v in os.environ.items() if k not in of_make}
        # setup.py finds ninja as in make.
        path = f"{self.root / '.venv' / 'bin'}:{clean['PATH']}"
        return subprocess.run(
            command,
            cwd=self.root,
            env={**clean, "PATH": path, "ONEFLOW_ACCEL_CACHE": "off", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )

    def has(self, name: str) -> bool:
        return (self.root / name).exists()

    def alias(self, name: str, text: str = f'#!/bin/sh\nexec {COMPILER} "$@"\n') -> str:
        file = self.write(f"compilers/{name}", text)
        file.chmod(0o755)
        return str(file)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_compile_error(checkout: Checkout) -> None:
    checkout.write("oneflow_accel/csrc/other/other.cpp", "#error this compiler is too old\n")
    checkout.write(LIBRARY, "of an earlier build")
    failed = checkout.make("plugin")
    assert failed.returncode == 2
    # The package is there before the kernels are tried.
    install = "install --no-build-isolation --no-deps -e ., plug-in off"
    assert install in failed.stdout
    assert checkout.has(".venv/.package")
    assert "The CPU kernels are not built: c++ (" in failed.stdout
    assert f"cannot compile them. {NEEDED} can (CXX names the one to take)" in failed.stdout
    log = checkout.root / "build" / "plugin.log"
    first = f"All errors are in {log}, the first is: "
    assert re.search(
        rf"{re.escape(first)}\S*other\.cpp:1:2: error: #error this compiler is too old\n",
        failed.stdout,
    )
    assert "All else is installed and runs, slowly, on stock OneFlow" in failed.stdout
    assert not checkout.has(LIBRARY)
    # The demo goes on.
    demo = checkout.make("demo")
    assert demo.returncode == 0, demo.stdout
    assert "The CPU kernels are not built" in demo.stdout
    assert "python -m resnet50_imagenet.demo" in demo.stdout
    # What needs no kernels can be had without.
    assert checkout.make("plugin", ONEFLOW_ACCEL_PLUGIN="off").returncode == 0
    # So says the package when it is used.
    assert_reason(checkout, "cannot compile them")

    checkout.write("oneflow_accel/csrc/other/other.cpp", "int other() { return 2; }\n")
    mended = checkout.make("plugin")
    assert mended.returncode == 0, mended.stdout
    assert install not in mended.stdout
    assert checkout.has(LIBRARY)
    assert not checkout.has(NOT_BUILT)
    # It goes on where it stopped.
    built = log.read_text()
    assert "unity_other_" in built or "unity_other.cpp" in built
    assert "good" not in built
    assert "make: Nothing to be done for 'plugin'." in checkout.make("plugin").stdout


def test_change_of_compiler(checkout: Checkout) -> None:
    assert checkout.make("plugin").returncode == 0
    compilers = checkout.root / "build" / "plugin" / "CMakeCache.txt"
    other = checkout.alias("g++-11")
    result = checkout.make("plugin", CXX=other)
    assert result.returncode == 0, result.stdout
    assert f"Building the C++ plug-in with {other}; " in result.stdout
    assert f"CMAKE_CXX_COMPILER:FILEPATH={other}\n" in compilers.read_text()
    # The next make keeps to it, also when a source changes.
    assert "Nothing to be done" in checkout.make("plugin").stdout
    assert "Nothing to be done" in checkout.make("plugin", f"CXX={other}").stdout
    stamp = checkout.write("oneflow_accel/csrc/good/good.cpp", "int good() { return 3; }\n")
    os.utime(stamp, (2e9, 2e9))
    assert f"Building the C++ plug-in with {other}; " in checkout.make("-n", "plugin").stdout
    # Named on make's own command line.
    third = checkout.alias("clang++")
    assert (
        f"Building the C++ plug-in with {third}; "
        in checkout.make("-n", "plugin", f"CXX={third}").stdout
    )
    # The first one again is a change, too.
    assert "Building the C++ plug-in with c++; " in checkout.make("-n", "plugin", CXX="c++").stdout


def test_compiler_is_installed_later(checkout: Checkout) -> None:
    without = checkout.make("plugin", CXX="no-such-compiler")
    assert without.returncode == 0, without.stdout
    assert "No C++ compiler: everything runs on stock kernels, slowly." in without.stdout
    assert not checkout.has(LIBRARY)
    assert_reason(checkout, f"no C++ compiler (no-such-compiler); install {NEEDED}")
    assert checkout.make("plugin").returncode == 0
    assert checkout.has(LIBRARY)


def test_package_without_the_plugin(checkout: Checkout) -> None:
    """What pip does: the package is built without, unless it is required."""
    checkout.write("oneflow_accel/csrc/other/other.cpp", "#error this compiler is too old\n")
    build = ("build", "--build-lib", "wheel")
    result = checkout.setup(*build)
    assert result.returncode == 0, result.stdout
    assert "cannot compile them" in (checkout.root / "wheel" / NOT_BUILT).read_text()
    assert checkout.has("wheel/oneflow_accel/__init__.py")
    result = checkout.setup(*build, ONEFLOW_ACCEL_REQUIRE_PLUGIN="1")
    assert result.returncode == 1
    assert "The CPU kernels are not built: c++ (" in result.stdout
    assert "Traceback" not in result.stdout
    result = checkout.setup(*build, ONEFLOW_ACCEL_PLUGIN="off")
    assert result.returncode == 0, result.stdout
    reason = (checkout.root / "wheel" / NOT_BUILT).read_text()
    assert reason == "ONEFLOW_ACCEL_PLUGIN was 'off' when it was installed"
    checkout.write("oneflow_accel/csrc/other/other.cpp", "int other() { return 2; }\n")
    result = checkout.setup(*build, ONEFLOW_ACCEL_REQUIRE_PLUGIN="1")
    assert result.returncode == 0, result.stdout
    assert checkout.has(f"wheel/{LIBRARY}")
    assert not checkout.has(f"wheel/{NOT_BUILT}")


def test_what_was_compiled_is_kept_for_other_checkouts(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = Checkout(tmp_path / "first"), Checkout(tmp_path / "second")

    def build(checkout: Checkout) -> tuple[bool, bytes]:
        """Whether it was compiled, and the library."""
        shutil.rmtree(checkout.root / "build", ignore_errors=True)
        done = checkout.setup("build_ext", "--inplace", ONEFLOW_ACCEL_CACHE=str(cache))
        assert done.returncode == 0, done.stdout
        return checkout.has("build/plugin"), (checkout.root / LIBRARY).read_bytes()

    compiled, library = build(first)
    assert compiled
    assert build(second) == (False, library)
    (kept,) = cache.iterdir()
    assert f"from the same sources: {kept}" in (second.root / "build/plugin.log").read_text()
    # The end of a file is missing, as after a full disk.
    kept.write_bytes(kept.read_bytes()[:-1])
    assert build(second) == (True, library)
    assert build(first) == (False, library)
    first.write("oneflow_accel/csrc/other/other.cpp", "int other() { return 3; }\n")
    compiled, changed = build(first)
    assert compiled
    assert changed != library
    assert build(second) == (False, library)
    assert first.make("clean", ONEFLOW_ACCEL_CACHE=str(cache)).returncode == 0
    assert not first.has("build")
    assert len(list(cache.iterdir())) == 2


def assert_reason(checkout: Checkout, reason: str) -> None:
    """oneflow_accel says so where the kernels are not there."""
    assert reason in (checkout.root / NOT_BUILT).read_text()
    code = f"""
import logging, pathlib
import oneflow_accel.kernels.plugin as plugin
plugin.load.cache_clear()
plugin._LIBRARY_FOLDER = pathlib.Path({str(checkout.root / NOT_BUILT)!r}).parent
print(plugin.load().reason)
"""
    result = run_process(["-c", code], env={"ONEFLOW_ACCEL_PLUGIN": "on"})
    assert reason in result.stdout
