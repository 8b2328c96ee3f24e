"""One installed package with the patches of its release: what to do to which module, and what
`patch --apply` has done to its files.

What was done on disk is in `.oneflow_accel_patches/<package>-<version>/` beside the package: a JSON
file and a copy of every original. A record says which content a file had and was given, by SHA-256;
which of the two is there is read off the file itself, so an interrupted run leaves nothing
ambiguous.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.series import (
    Patch,
    SourceLine,
    apply_hunks,
    load_series,
    patch_names,
    series_builds,
    series_for,
    series_versions,
    source_lines,
)


def find_spec(
    name: str, path: Sequence[str] | None = None, *, skip: type | None = None
) -> ModuleSpec | None:
    """The spec of a module from the first finder that knows it, without those of type `skip`."""
    for finder in sys.meta_path:
        if skip is None or not isinstance(finder, skip):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


def installed_version(package: str) -> str | None:
    """The installed release, None if there is none; without a local part ("0.9.0" for
    "0.9.0+cu117"), as PEP 440 has both match a pin on 0.9.0."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def install_folder(package: str, *, skip: type | None = None) -> Path | None:
    """The folder, such as site-packages, that holds a package's folder, None if Python finds no
    package of that name."""
    spec = find_spec(package, skip=skip)
    # A folder that merely has the name is a "namespace package", without a file of its own.
    return (
        None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent.parent
    )


def module_name(path: str) -> str:
    """The module in a file, from its path below site-packages."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FOLDER = ".oneflow_accel_patches"


@dataclass(frozen=True)
class Record:
    """SHA-256 of one file as installed and as patched, and of each patch file by its name, in the
    order they were applied."""

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
        return self.install_folder / FOLDER / f"{self.package}-{self.version}"

    @property
    def _advice(self) -> str:
        release = f"{self.package}=={self.version}"
        return f"install {release} again (pip install --force-reinstall --no-deps)"

    @classmethod
    def read(cls, install_folder: Path, package: str, version: str) -> DiskState:
        """The state on disk, empty where nothing was applied; PatchError where it is broken."""
        state = cls(install_folder, package, version)
        file = state.folder / "state.json"
        try:
            records = json.loads(file.read_text(encoding="utf-8"))["files"]
            state.records = {path: Record(**record) for path, record in records.items()}
        except FileNotFoundError:
            return state
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchError(
                f"{file} is broken ({error}): {state._advice}, then delete {state.folder}"
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
        """The record of a file if it is patched, None if it is as installed; PatchError if
        something else has changed it since."""
        record = self.records.get(path)
        if record is None or sha256(content) == record.original:
            return None
        if sha256(content) != record.patched:
            raise PatchError(
                f"{self.install_folder / path} was modified since {', '.join(record.patches)} was "
                f"applied on disk: {self._advice}"
            )
        return record

    def store_original(self, path: str, content: bytes) -> None:
        file = self._original_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)

    def original(self, path: str) -> bytes:
        """A patched file as installed; PatchError if the copy is missing or not what it was."""
        file = self._original_file(path)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PatchError(f"the original of {path} cannot be read: {error}") from error
        if sha256(content) != self.records[path].original:
            raise PatchError(f"{file} is not the original of {path} any more: {self._advice}")
        return content

    def _original_file(self, path: str) -> Path:
        return self.folder / "originals" / path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, keeping its mode. A new file, because
    installers such as uv hard-link packages to a cache that other environments share."""
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


@dataclass(frozen=True)
class PatchedSource:
    """A file before and after its patches."""

    path: str
    patches: tuple[Patch, ...]
    original: list[SourceLine]
    patched: list[SourceLine]

    @property
    def label(self) -> str:
        return " + ".join(patch.label for patch in self.patches)


@dataclass
class PatchedPackage:
    """An installed package, the patches for it, and what became of them.

    Attributes:
        folder: that holds the package's folder, such as site-packages.
        loaded: the modules that each patch, by name, has been applied to in this process.
        refused: why a patch, by name, is not applied in this process though it is needed.
    """

    name: str
    version: str
    folder: Path
    patches: list[Patch]
    disk: DiskState
    loaded: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path, name: str, *, skip: type | None = None) -> PatchedPackage | None:
        """The patches in `root` for the installed build, None if the package is not installed.

        Raises:
            PatchError: there is no series for that release, or a patch is broken.
        """
        folder = install_folder(name, skip=skip)
        if folder is None:
            return None
        version = installed_version(name)
        series = None if version is None else series_for(root, name, version)
        if version is None or series is None:
            versions = series_versions(root)[name]
            names = [
                f"{name}-{known}/{p}" for known in versions for p in patch_names(root, name, known)
            ]
            builds = [f"{name}{series_builds(root, name, known)}" for known in versions]
            raise PatchError(
                f"{name} {version or 'of unknown version'} is in {folder}, but its patches "
                f"({', '.join(names)}) are for other builds: install {' or '.join(builds)}"
            )
        disk = DiskState.read(folder, name, version)
        package = cls(name, version, folder, load_series(root, name, series), disk)
        package.patches = [patch for patch in package.patches if package._is_for_files(patch)]
        return package

    def _is_for_files(self, patch: Patch) -> bool:
        """Whether a patch that is for one content of its file only finds that, as installed."""
        for path in patch.hunks if patch.for_file else ():
            content = self.read(path)
            record = self.disk.in_effect(path, content)
            installed = sha256(content) if record is None else record.original
            if installed != patch.for_file:
                return False
        return True

    @cached_property
    def modules(self) -> dict[str, str]:
        """The modules that some patch edits, each with its path below `folder`."""
        return {module_name(path): path for patch in self.patches for path in patch.hunks}

    def needed(self, path: str) -> tuple[Patch, ...]:
        """The patches of one file, without those that are refused."""
        return tuple(
            patch
            for patch in self.patches
            if path in patch.hunks and patch.name not in self.refused
        )

    def refuse(self, path: str, reason: str) -> None:
        """Leave the patches of a file out, and those that share a file with one of them: a patch is
        made for what the ones before it leave, and for all of its files or none."""
        paths = {path}
        for _ in self.patches:
            for patch in self.patches:
                if paths & patch.hunks.keys():
                    paths |= patch.hunks.keys()
                    self.refused.setdefault(patch.name, reason)

    def has_applied(self, source: PatchedSource, module: str) -> bool:
        return all(module in self.loaded.get(patch.name, ()) for patch in source.patches)

    def note_applied(self, source: PatchedSource, module: str) -> None:
        for patch in source.patches:
            modules = self.loaded.setdefault(patch.name, [])
            if module not in modules:
                modules.append(module)

    def missing(self, path: str) -> PatchedSource | None:
        """A file with the patches that it needs and lacks, None if it lacks none.

        Raises:
            PatchError: a patch does not fit, or other patches were applied on disk.
        """
        patches = self.needed(path)
        if not patches:
            return None
        content = self.read(path)
        record = self.disk.in_effect(path, content)
        if record is None:
            return self.patch(path, patches, content)
        wanted = {patch.name: patch.sha256 for patch in patches}
        if wanted.items() <= record.patches.items():
            return None
        raise PatchError(
            f"{self.folder / path} has {', '.join(record.patches)} applied on disk, which is not "
            f"what is needed now ({', '.join(wanted)}, of the present content): run "
            "ONEFLOW_ACCEL_PATCHES=off python -m oneflow_accel patch --apply again"
        )

    def read(self, path: str) -> bytes:
        try:
            return (self.folder / path).read_bytes()
        except OSError as error:
            labels = ", ".join(patch.label for patch in self.patches if path in patch.hunks)
            raise PatchError(f"{labels} edits {path}, which cannot be read: {error}") from error

    def patch(self, path: str, patches: tuple[Patch, ...], content: bytes) -> PatchedSource:
        """Apply patches to the original content of a file, all or none."""
        try:
            original = source_lines(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise PatchError(f"patch {patches[0].label}: {path} is not UTF-8: {error}") from error
        patched = original
        for patch in patches:
            patched = apply_hunks(patched, patch.hunks[path], label=patch.label, path=path)
        return PatchedSource(path, patches, original, patched)

    def on_disk(self, patch: Patch) -> bool:
        """Whether all files of a patch have it on disk."""
        for path in patch.hunks:
            record = self.disk.in_effect(path, self.read(path))
            if record is None or record.patches.get(patch.name) != patch.sha256:
                return False
        return True
