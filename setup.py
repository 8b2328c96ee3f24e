"""Builds the C++ plug-in and ships patches/ inside the package; the rest is in pyproject.toml."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# As in oneflow_accel/kernels/plugin.py.
WRITTEN_FOR = "0.9.0"
COMPILERS = "g++ 11 or newer"
# Builds whose libraries are kept for later ones, of some 8 MB each.
KEPT = 10
logger = logging.getLogger("oneflow_accel.setup")


# pip looks at `requires-python` only after it has looked for oneflow, which it does not find.
if sys.version_info[:2] != (3, 10):
    sys.exit(
        f"oneflow-accel needs CPython 3.10, the newest that oneflow 0.9.0 has wheels for; this is "
        f"{sys.version.split()[0]}."
    )


class BuildPlugin(build_ext):
    """Runs CMake. Where the plug-in cannot be built the package is made without it, and says why
    when it is used; with ONEFLOW_ACCEL_REQUIRE_PLUGIN=1 that is an error."""

    def run(self) -> None:
        package = ROOT if self.editable_mode or self.inplace else Path(self.build_lib)
        version = importlib.metadata.version("oneflow")
        if version.partition("+")[0] != WRITTEN_FOR:
            logger.warning(
                "the CPU kernels are written for oneflow %s and not for %s: building without them; "
                "everything runs, on a CPU slowly, on stock OneFlow",
                WRITTEN_FOR,
                version,
            )
            return
        target = package / "oneflow_accel" / "_lib"
        target.mkdir(parents=True, exist_ok=True)
        # Read by oneflow_accel.kernels.plugin.
        reason_file = target / "not_built.txt"
        reason_file.unlink(missing_ok=True)
        reason = self._build_into(target)
        if reason is None:
            return
        reason_file.write_text(reason)
        if os.environ.get("ONEFLOW_ACCEL_REQUIRE_PLUGIN") == "1":
            sys.exit(f"The CPU kernels are not built: {reason}")
        logger.warning("%s; everything runs, slowly, on stock OneFlow", reason)

    def _build_into(self, target: Path) -> str | None:
        """Why there is no plug-in, if there is none."""
        if os.environ.get("ONEFLOW_ACCEL_PLUGIN") == "off":
            return "ONEFLOW_ACCEL_PLUGIN was 'off' when it was installed"
        compiler, *arguments = shlex.split(os.environ.get("CXX") or "c++")
        program = shutil.which(compiler)
        if program is None:
            return (
                f"no C++ compiler ({compiler}); install {COMPILERS} (Debian: apt-get install g++), "
                "then build again"
            )
        log = ROOT / "build" / "plugin.log"
        log.parent.mkdir(exist_ok=True)
        kept = _kept_file(program, arguments)
        libraries = _read_kept(kept)
        if libraries is None:
            folder, failed = self._compile(program, arguments, log)
            if failed is not None:
                for old in target.glob("*.so"):
                    # Of other sources, which the Python files may not fit.
                    old.unlink()
                return (
                    f"{compiler} ({_version(program)[0]}) cannot compile them. {COMPILERS} can "
                    f"(CXX names the one to take). All errors are in {log}, the first is: {failed}"
                )
            libraries = {
                file.stem: file.read_bytes() for file in folder.glob("liboneflow_accel_*.so")
            }
            _keep(kept, libraries)
        else:
            log.write_text(f"Compiled earlier, from the same sources: {kept}\n")
        # The names that oneflow_accel.kernels.plugin.library_name() looks for. Renamed into place:
        # a running process may have the old file mapped.
        version = importlib.metadata.version("oneflow")
        files = {target / f"{stem}_oneflow_{version}.so": libraries[stem] for stem in libraries}
        for file, library in files.items():
            _write(file, library)
        for old in set(target.glob("*.so")).difference(files):
            old.unlink()
        return None

    def _compile(self, program: str, arguments: list[str], log: Path) -> tuple[Path, str | None]:
        """The folder with the library, and the first error if there is one."""
        options = self._cmake_options()
        folder = self._build_folder([*options, os.path.realpath(program), *arguments])
        with log.open("w") as output:
            for command in (["cmake", *options, str(ROOT)], ["cmake", "--build", "."]):
                done = subprocess.run(
                    command, cwd=folder, stdout=output, stderr=subprocess.STDOUT
                ).returncode
                if done != 0:
                    break
        return folder, _first_error(log) if done != 0 else None

    def _build_folder(self, made_with: list[str]) -> Path:
        """Where CMake works. That of a checkout stays, so that a build goes on where one stopped,
        unless it was `made_with` something else."""
        if not (self.editable_mode or self.inplace):
            folder = Path(self.build_temp).resolve() / "plugin"
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folder = ROOT / "build" / "plugin"
        mark = folder / "made_with.json"
        if not mark.exists() or json.loads(mark.read_text()) != made_with:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            mark.write_text(json.dumps(made_with))
        return folder

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
            kept = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "patches", target, dirs_exist_ok=True, ignore=kept)


def _kept_file(program: str, arguments: list[str]) -> Path | None:
    """Where the libraries that these sources give with this compiler are kept for all builds of all
    checkouts of a user; None where ONEFLOW_ACCEL_CACHE is 'off'."""
    folder = os.environ.get("ONEFLOW_ACCEL_CACHE") or Path.home() / ".cache" / "oneflow_accel"
    if folder == "off":
        return None
    files = (ROOT / "oneflow_accel").rglob("*.*")
    sources = sorted(file for file in files if file.suffix in (".cpp", ".h", ".cmake"))
    packages = ("oneflow", "onednn-cpu-gomp", "onednn-devel-cpu-gomp")
    made_from = [
        [_version(program), arguments, platform.machine(), platform.libc_ver()],
        [os.environ.get(name) for name in ("CXXFLAGS", "CPPFLAGS", "CPATH", "LDFLAGS")],
        [importlib.metadata.version(package) for package in packages],
        [
            (str(file.relative_to(ROOT)), _checksum(file.read_bytes()).hex())
            for file in [ROOT / "CMakeLists.txt", *sources]
        ],
    ]
    return Path(folder) / f"{_checksum(json.dumps(made_from).encode()).hex()}.libraries"


def _read_kept(file: Path | None) -> dict[str, bytes] | None:
    """The libraries by their names, an archive; None where it is not there, or not whole."""
    try:
        with zipfile.ZipFile(file or "") as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return None


def _keep(file: Path | None, libraries: dict[str, bytes]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, library in libraries.items():
                archive.writestr(name, library)
        _write(file, content.getvalue())
        by_age = sorted(file.parent.glob("*.libraries"), key=lambda kept: kept.stat().st_mtime)
        for old in by_age[:-KEPT]:
            old.unlink()
    except OSError as error:
        logger.warning("the compiled kernels are not kept for later builds: %s", error)


def _write(file: Path, content: bytes) -> None:
    """All of it or nothing, whoever reads or writes it at the same time."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as new:
        new.write(content)
    os.chmod(new.name, 0o755)
    os.replace(new.name, file)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _version(program: str) -> list[str]:
    result = subprocess.run([program, "--version"], capture_output=True, text=True)
    return result.stdout.splitlines() or ["no version"]


def _first_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if re.search(r"\b(fatal )?error\b", line, re.IGNORECASE):
            # CMake has the place in one line and the message in the next ones.
            return " ".join(lines[number : number + (4 if line.startswith("CMake Error") else 1)])
    return lines[-1] if lines else "none"


def _file_of(package: str, name: str) -> Path:
    for file in importlib.metadata.files(package) or []:
        if file.name == name and "oneapi" not in file.parts:
            return Path(str(file.locate())).resolve()
    sys.exit(f"{package} is installed without {name}")


setup(
    ext_modules=[Extension("oneflow_accel._plugin", sources=[])],
    cmdclass={"build_ext": BuildPlugin, "build_py": BuildWithPatches},
)
