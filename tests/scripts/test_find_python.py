"""scripts/find_python.sh on machines without the CPython it looks for.

Stand-ins are `python3`, the tests' Python under a name that hides its version, and mostly `uv`, a
wheel that links to it. No test needs the machine that CPython is fetched from.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

# What the script and the Makefile call; nothing else is on the PATH.
TOOLS = ("bash", "cp", "dirname", "env", "find", "ln", "make", "mkdir", "rm", "sh", "touch")
WANTED = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = Path(sys.base_prefix) / "bin" / f"python{WANTED}"
UV = (REPOSITORY / "requirements" / "uv.txt").read_text().split("uv==")[1].strip()

FAKE_UV = """#!/bin/sh
echo "fake uv $*, mirror $UV_PYTHON_INSTALL_MIRROR" >&2
[ -z "$UV_FAILS" ] || { echo "error: the download failed" >&2; exit 1; }
bin=$UV_PYTHON_INSTALL_DIR/cpython-$4.99-linux-x86_64-gnu/bin
mkdir -p "$bin" && ln -s "${UV_INSTALLS-PYTHON}" "$bin/python$4"
""".replace("PYTHON}", f"{PYTHON}}}")


def write_command(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


class Machine:
    """A checkout and a PATH of its own, on which no Python is yet."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.wheels = folder / "wheels"
        for new in (self.root, self.bin, self.wheels, folder / "home"):
            new.mkdir()
        for name in ("scripts", "requirements"):
            shutil.copytree(REPOSITORY / name, self.root / name)
        for name in ("Makefile", "pyproject.toml", "setup.py", "CMakeLists.txt"):
            shutil.copy(REPOSITORY / name, self.root)
        (self.root / "oneflow_accel" / "csrc").mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder / "home"),
            "PIP_CONFIG_FILE": os.devnull,
        }

    def add_python(self, name: str, version: str, *, venv: bool = True) -> None:
        """A command of this name that says it is CPython `version`."""
        major, minor = version.split(".")
        lies = f"import sys; sys.version_info = ({major}, {minor}, 0)"
        lacks = "" if venv else 'case "$2" in *ensurepip*) exit 1;; esac\n'
        write_command(
            self.bin / name,
            f'#!/bin/sh\n{lacks}[ "$1" != -c ] || exec {PYTHON} -c "{lies}; $2"\n'
            f'exec {PYTHON} "$@"\n',
        )

    def make_index_with_uv(self) -> str:
        """The address of an index that has the stand-in for uv."""
        folder = self.wheels / "simple" / "uv"
        folder.mkdir(parents=True)
        name = f"uv-{UV}-py3-none-any.whl"
        (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
        with zipfile.ZipFile(folder / name, "w") as wheel:
            info = f"uv-{UV}.dist-info"
            script = zipfile.ZipInfo(f"uv-{UV}.data/scripts/uv")
            script.external_attr = (stat.S_IFREG | 0o755) << 16
            wheel.writestr(script, FAKE_UV)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {UV}\n")
            wheel.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{info}/RECORD", "")
        return folder.parent.as_uri()

    def run(self, *command: str, env: Mapping[str, str] | None = None):
        return subprocess.run(
            command,
            cwd=self.root,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def find(self, wanted: str = WANTED, **env: str):
        return self.run("bash", "scripts/find_python.sh", wanted, env=env)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def advice(wanted: str) -> str:
    return (
        f"Get one with either of these, then call make again:\n"
        f"    pyenv install {wanted}\n"
        f"    uv python install {wanted}\n"
        f"or name one: make PYTHON=/path/to/python{wanted}\n"
    )


# 3.11 is the Python of the peers.
@pytest.mark.parametrize("wanted", ["3.10", "3.11"])
def test_what_is_not_there_is_fetched_once(machine: Machine, wanted: str) -> None:
    machine.add_python("python3", "3.13")
    machine.add_python("what-uv-installs", wanted)
    write_command(machine.bin / "uv", FAKE_UV)
    machine.env["UV_INSTALLS"] = str(machine.bin / "what-uv-installs")
    result = machine.find(wanted, UV_PYTHON_INSTALL_MIRROR="file:///mirror")
    assert result.returncode == 0, result.stderr
    versions = machine.root / ".python" / "versions"
    fetched = versions / f"cpython-{wanted}.99-linux-x86_64-gnu" / "bin" / f"python{wanted}"
    assert result.stdout == f"{fetched}\n"
    assert f"No CPython {wanted} found" in result.stderr
    assert f"Fetching CPython {wanted} (some 30 MB) into .python/versions" in result.stderr
    assert f"python install {wanted}, mirror file:///mirror" in result.stderr
    again = machine.find(wanted)
    assert (again.stdout, again.stderr) == (f"{fetched}\n", "")


def test_download_fails(machine: Machine) -> None:
    """... and make leaves no half of an environment behind."""
    write_command(machine.bin / "uv", FAKE_UV)
    result = machine.run("make", "setup", env={"UV_FAILS": "1"})
    assert result.returncode == 2
    assert "error: the download failed" in result.stderr
    assert advice(WANTED) in result.stderr
    assert result.stderr.count("No CPython") == 1
    assert not (machine.root / ".venv").exists()
    result = machine.run("make", ".venv-peer/.requirements", env={"UV_FAILS": "1"})
    assert result.returncode == 2
    assert advice("3.11") in result.stderr
    assert not (machine.root / ".venv-peer").exists()


def test_uv_comes_from_the_index(machine: Machine) -> None:
    machine.add_python("python3", "3.13")
    result = machine.find(UV_DEFAULT_INDEX=machine.make_index_with_uv())
    assert result.returncode == 0, result.stderr
    assert "Fetching uv into .python/uv\n" in result.stderr
    assert result.stdout.startswith(f"{machine.root}/.python/versions/cpython-{WANTED}.99-")


def test_no_python_at_all(machine: Machine) -> None:
    result = machine.find()
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is no python3 to fetch one with: apt-get install python3-venv\n" in result.stderr
    assert advice(WANTED) in result.stderr


def test_python3_without_venv(machine: Machine) -> None:
    machine.add_python("python3", "3.13", venv=False)
    result = machine.find()
    assert (result.returncode, result.stdout) == (2, "")
    assert "python3 has no venv module: apt-get install python3.13-venv\n" in result.stderr
    assert not (machine.root / ".python").exists()


@pytest.mark.parametrize("name", [f"python{WANTED}", "python3"])
def test_the_right_python_without_venv(machine: Machine, name: str) -> None:
    """Ubuntu 22.04 as it is installed: no environment can be made with its Python, nor uv's."""
    machine.add_python(name, WANTED, venv=False)
    if name != "python3":
        machine.add_python("python3", WANTED, venv=False)
    result = machine.find()
    assert (result.returncode, result.stdout) == (2, "")
    line = f"{name} has no venv module: apt-get install python{WANTED}-venv\n"
    assert result.stderr.count(line) == 1
    assert advice(WANTED) in result.stderr
