"""What `patch --apply` has done to an installed package: a JSON file and a copy of every original.

They are beside the package, in `.oneflow_accel_patches/<package>-<version>/`. A record says which
content a file had and was given, by SHA-256; which of the two is there is read off the file
itself, so an interrupted run leaves nothing ambiguous.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from oneflow_accel.errors import PatchError

FOLDER = ".oneflow_accel_patches"


@dataclass(frozen=True)
class Record:
    """One patched file.

    Attributes:
        original: SHA-256 of the file as installed.
        patched: SHA-256 of the file with the patches.
        patches: SHA-256 of each patch file by its name, in the order they were applied.
    """

    original: str
    patched: str
    patches: dict[str, str]


@dataclass
class DiskState:
    """The records of one release of one package, by path below `install_folder`."""

    install_folder: Path
    package: str
    version: str
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the state and the originals are."""
        return self.install_folder / FOLDER / f"{self.package}-{self.version}"

    @classmethod
    def read(cls, install_folder: Path, package: str, version: str) -> DiskState:
        """The state on disk; empty where nothing was applied.

        Raises:
            PatchError: the state file cannot be read.
        """
        state = cls(install_folder, package, version)
        file = state.folder / "state.json"
        try:
            records = json.loads(file.read_text(encoding="utf-8"))["files"]
            state.records = {path: Record(**record) for path, record in records.items()}
        except FileNotFoundError:
            return state
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchError(
                f"{file} is broken ({error}): install {package}=={version} again "
                f"(pip install --force-reinstall --no-deps), then delete {state.folder}"
            ) from error
        return state

    def write(self) -> None:
        """Store the state; without records, remove it together with the originals."""
        if self.records:
            records = {path: dataclasses.asdict(record) for path, record in self.records.items()}
            text = json.dumps({"files": records}, indent=2) + "\n"
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "state.json", text.encode())
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.is_dir() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    def in_effect(self, path: str, content: bytes) -> Record | None:
        """The record of a file if the file is patched, None if it is as installed.

        Raises:
            PatchError: it was patched and something else has changed it since.
        """
        record = self.records.get(path)
        if record is None or sha256(content) == record.original:
            return None
        if sha256(content) != record.patched:
            raise PatchError(
                f"{self.install_folder / path} was modified since {', '.join(record.patches)} was "
                f"applied on disk: install {self.package}=={self.version} again "
                "(pip install --force-reinstall --no-deps)"
            )
        return record

    def store_original(self, path: str, content: bytes) -> None:
        """Keep a copy of a file as installed."""
        file = self._original_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)

    def original(self, path: str) -> bytes:
        """The content of a patched file as installed.

        Raises:
            PatchError: the copy is missing or is not what it was.
        """
        file = self._original_file(path)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PatchError(f"the original of {path} cannot be read: {error}") from error
        if sha256(content) != self.records[path].original:
            raise PatchError(
                f"{file} is not the original of {path} any more: install "
                f"{self.package}=={self.version} again (pip install --force-reinstall --no-deps)"
            )
        return content

    def _original_file(self, path: str) -> Path:
        return self.folder / "originals" / path


def sha256(content: bytes) -> str:
    """SHA-256 as hexadecimal text."""
    return hashlib.sha256(content).hexdigest()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, keeping its mode.

    A new file, because installers such as uv hard-link packages to a cache that other environments
    share.
    """
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, file.stat().st_mode if file.exists() else 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
