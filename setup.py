"""Builds the C++ plug-in and ships patches/ inside the package; the rest is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
logger = logging.getLogger("oneflow_accel.setup")


# pip looks at `requires-python` only after it has looked for oneflow, which it does not find.
if sys.version_info[:2] != (3, 10):
    sys.exit(
        f"oneflow-accel needs CPython 3.10, the newest that oneflow 0.9.0 has wheels for; this is "
        f"{sys.version.split()[0]}."
    )


class BuildPlugin(build_ext):
    """Runs CMake. Without a C++ compiler the package is built without the plug-in, and says so."""

    def run(self) -> None:
        package = ROOT if self.editable_mode or self.inplace else Path(self.build_lib)
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            logger.warning(
                "no C++ compiler (CXX, c++): building without the CPU kernels; everything runs, "
                "slowly, on stock OneFlow (Debian: apt-get install g++, then build again)"
            )
            return
        version = importlib.metadata.version("oneflow")
        build_folder = Path(self.build_temp).resolve() / "plugin"
        build_folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cmake", *self._cmake_options(), str(ROOT)], cwd=build_folder, check=True)
        subprocess.run(["cmake", "--build", ".", "--parallel"], cwd=build_folder, check=True)
        target = package / "oneflow_accel" / "_lib"
        target.mkdir(parents=True, exist_ok=True)
        # The name that oneflow_accel.kernels.plugin.library_name() looks for. Renamed into place:
        # a running process may have the old file mapped.
        name = f"liboneflow_accel_cpu_oneflow_{version}.so"
        shutil.copy(build_folder / "liboneflow_accel_cpu.so", target / f".{name}")
        os.replace(target / f".{name}", target / name)

    def _cmake_options(self) -> list[str]:
        # Found without importing it: in a build environment it would not find cuDNN.
        package = Path(importlib.util.find_spec("oneflow").origin).parent
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "ONEFLOW_INCLUDE_DIR": package / "include",
            "ONEFLOW_LIBRARY_DIR": package.parent / "oneflow.libs",
            "ONEDNN_INCLUDE_DIR": _file_of("onednn-devel-cpu-gomp", "dnnl.hpp").parent,
            "ONEDNN_LIBRARY": _file_of("onednn-cpu-gomp", "libdnnl.so.3"),
        }
        return ["-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items())]

    # build_ext's own idea of what its outputs are does not fit a library of CMake's.
    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildWithPatches(build_py):
    """Copies patches/ into the wheel, where oneflow_accel.patching looks for them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "oneflow_accel" / "_patches"
            shutil.copytree(ROOT / "patches", target, dirs_exist_ok=True)


def _file_of(package: str, name: str) -> Path:
    for file in importlib.metadata.files(package) or []:
        if file.name == name and "oneapi" not in file.parts:
            return Path(str(file.locate())).resolve()
    sys.exit(f"{package} is installed without {name}")


setup(
    ext_modules=[Extension("oneflow_accel._plugin", sources=[])],
    cmdclass={"build_ext": BuildPlugin, "build_py": BuildWithPatches},
)
