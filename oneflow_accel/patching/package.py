"""One installed package with the patches of its release: what to do to which module."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.conditions import DeviceFinder, holds
from oneflow_accel.patching.diskstate import DiskState
from oneflow_accel.patching.header import Condition
from oneflow_accel.patching.hunks import SourceLine, apply_hunks, source_lines
from oneflow_accel.patching.packages import install_folder, installed_version, module_name
from oneflow_accel.patching.series import (
    Patch,
    load_series,
    patch_names,
    series_builds,
    series_for,
    series_versions,
)


@dataclass(frozen=True)
class PatchedSource:
    """A file before and after its patches."""

    path: str
    patches: tuple[Patch, ...]
    original: list[SourceLine]
    patched: list[SourceLine]

    @property
    def label(self) -> str:
        """Names the patches in errors and logs."""
        return " + ".join(patch.label for patch in self.patches)


@dataclass
class PatchedPackage:
    """An installed package, the patches for it, and what has been decided about them.

    Attributes:
        name: of the package, as imported.
        version: that is installed.
        folder: that holds the package's folder, such as site-packages.
        patches: of this release, in order.
        disk: what `patch --apply` has done.
        decisions: whether each condition held when a module first depended on it.
        loaded: the modules that each patch, by name, has been applied to in this process.
        refused: why a patch, by name, is not applied in this process though it is needed.
    """

    name: str
    version: str
    folder: Path
    patches: list[Patch]
    disk: DiskState
    decisions: dict[Condition, bool] = field(default_factory=dict)
    loaded: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path, name: str, *, skip: type | None = None) -> PatchedPackage | None:
        """Read the patches for the installed release.

        Args:
            root: the folder of all patches.
            name: of the package.
            skip: type of finders not to look for the package with.

        Returns:
            None if the package is not installed.

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
        return cls(name, version, folder, load_series(root, name, series), disk)

    def modules(self) -> dict[str, str]:
        """The modules that some patch edits, each with its path below `folder`."""
        return {module_name(path): path for patch in self.patches for path in patch.hunks}

    def needed(self, path: str, find_device: DeviceFinder) -> tuple[Patch, ...]:
        """The patches of one file that are needed; what is decided once stays decided."""
        return tuple(
            patch
            for patch in self.patches
            if path in patch.hunks
            and patch.name not in self.refused
            and self._decide(patch.header.applies_when, find_device)
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
        """Whether a module has got its patches in this process."""
        return all(module in self.loaded.get(patch.name, ()) for patch in source.patches)

    def note_applied(self, source: PatchedSource, module: str) -> None:
        """Remember that a module has got its patches."""
        for patch in source.patches:
            modules = self.loaded.setdefault(patch.name, [])
            if module not in modules:
                modules.append(module)

    def missing(self, path: str, find_device: DeviceFinder) -> PatchedSource | None:
        """A file with the patches that it needs and lacks.

        Returns:
            None if it needs none, or has them on disk.

        Raises:
            PatchError: a patch does not fit, or other patches were applied on disk.
        """
        patches = self.needed(path, find_device)
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
        """The content of a file that patches edit.

        Raises:
            PatchError: there is no such file.
        """
        try:
            return (self.folder / path).read_bytes()
        except OSError as error:
            labels = ", ".join(patch.label for patch in self.patches if path in patch.hunks)
            raise PatchError(f"{labels} edits {path}, which cannot be read: {error}") from error

    def patch(self, path: str, patches: tuple[Patch, ...], content: bytes) -> PatchedSource:
        """Apply patches to the original content of a file, all or none.

        Raises:
            PatchError: one does not fit.
        """
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

    def _decide(self, condition: Condition, find_device: DeviceFinder) -> bool:
        if condition not in self.decisions:
            self.decisions[condition] = holds(condition, find_device)
        return self.decisions[condition]
