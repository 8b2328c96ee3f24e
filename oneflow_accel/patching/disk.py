"""The command `python -m oneflow_accel patch`: applies patches to installed files, and takes them
back; for those who want it on disk.

Everything is worked out in memory first. Files are then replaced one by one, each atomically; if
one cannot be written, those already written are put back.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from oneflow_accel.errors import PatchError
from oneflow_accel.patching import session
from oneflow_accel.patching.code import parse
from oneflow_accel.patching.package import (
    FOLDER,
    DiskState,
    PatchedPackage,
    Record,
    install_folder,
    installed_version,
    sha256,
    write_atomically,
)
from oneflow_accel.patching.series import join, patch_root, series_versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--apply", action="store_true", help="write the patches into site-packages")
    action.add_argument("--revert", action="store_true", help="put the original files back")
    action.add_argument("--status", action="store_true", help="list the patches")
    parser.add_argument("--package", help="only this package (default: all that have patches)")


def run(args: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code: 0, or 1 if `--status` lists a refused patch.

    Raises:
        UserError: there are no such patches, or they cannot be applied or taken back.
    """
    known = series_versions(patch_root())
    if args.package not in (None, *known):
        raise PatchError(f"there are no patches for {args.package!r}, only for {', '.join(known)}")
    names = [args.package] if args.package else [n for n in known if install_folder(n) is not None]
    if args.status:
        shown = [one for one in session.status() if one.package in names]
        for one in shown:
            print(f"{one.package}-{one.version}/{one.name}: {one.state} ({one.reason})")
        return int(any(one.state == "refused" for one in shown))
    for name in names:
        files = apply(patch_root(), name) if args.apply else revert(name)
        done = "patched" if args.apply else "put back"
        print(f"{name}: {done} {', '.join(files)}" if files else f"{name}: nothing to do")
    return 0


@dataclass(frozen=True)
class Change:
    """A file to replace: its path below the folder that the package is installed in, its content
    now, as installed and from now on, and what to remember of it (None where it goes back to the
    original)."""

    path: str
    before: bytes
    original: bytes
    after: bytes
    record: Record | None


def apply(root: Path, name: str) -> list[str]:
    """Put the patches on disk, and take back those that there are no more.

    Raises:
        PatchError: a patch does not fit, or a file cannot be written; nothing was changed.
    """
    package = PatchedPackage.load(root, name)
    if package is None:
        raise PatchError(f"{name} is not installed")
    paths = sorted(set(package.modules.values()) | set(package.disk.records))
    return _carry_out(package.disk, paths, package)


def revert(name: str) -> list[str]:
    """Take all patches of a package back.

    Raises:
        PatchError: a file was modified since, or cannot be written; nothing was changed.
    """
    folder = install_folder(name)
    if folder is None:
        raise PatchError(f"{name} is not installed")
    version = installed_version(name)
    files: list[str] = []
    for state_folder in sorted((folder / FOLDER).glob(f"{name}-*")):
        state = DiskState.read(folder, name, state_folder.name.removeprefix(f"{name}-"))
        # Else the installer has replaced the files since; what is left is only our record of it.
        if state.version == version:
            files += _carry_out(state, list(state.records))
        state.records.clear()
        state.write()
    return files


def _change(state: DiskState, path: str, package: PatchedPackage | None) -> Change | None:
    """What gives a file the patches of `package`, or its original where that has none for it or
    there is none; None if it is so."""
    try:
        before = (state.install_folder / path).read_bytes()
    except OSError as error:
        raise PatchError(f"{path}, which is patched on disk, cannot be read: {error}") from error
    in_effect = state.in_effect(path, before)
    after = original = before if in_effect is None else state.original(path)
    patches, record = package.needed(path) if package is not None else (), None
    if package is not None and patches:
        source = package.patch(path, patches, original)
        parse(source.patched, label=source.label, path=path)
        after = join(source.patched).encode()
        digests = {patch.name: patch.sha256 for patch in patches}
        record = Record(sha256(original), sha256(after), digests)
    return None if record == in_effect else Change(path, before, original, after, record)


def _carry_out(
    state: DiskState, paths: list[str], package: PatchedPackage | None = None
) -> list[str]:
    """Change these files as `_change` says, all or none; returns those that were changed."""
    found = [_change(state, path, package) for path in paths]
    changes = [change for change in found if change is not None]
    records = dict(state.records)
    try:
        for change in changes:
            # Original first: whenever this is interrupted, the file is one of the two contents
            # that its record names.
            if change.before != change.original:
                _replace(state.install_folder / change.path, change.original)
            if change.record is not None:
                state.store_original(change.path, change.original)
                state.records[change.path] = change.record
                state.write()
                _replace(state.install_folder / change.path, change.after)
        for change in changes:
            if change.record is None:
                state.records.pop(change.path, None)
        state.write()
    except OSError as error:
        state.records = records
        _put_back(state, changes)
        raise PatchError(
            f"{state.install_folder} cannot be written ({error}); nothing was changed"
        ) from error
    return [change.path for change in changes]


def _put_back(state: DiskState, changes: list[Change]) -> None:
    # What cannot be written now could not be written before either, so it is unchanged.
    with contextlib.suppress(OSError):
        state.write()
    for change in changes:
        file = state.install_folder / change.path
        with contextlib.suppress(OSError):
            if file.read_bytes() != change.before:
                _replace(file, change.before)


def _replace(file: Path, content: bytes) -> None:
    write_atomically(file, content)
    # Python takes a bytecode file for current if size and time in seconds match.
    for optimization in ("", "1", "2"):
        cached = importlib.util.cache_from_source(str(file), optimization=optimization)
        Path(cached).unlink(missing_ok=True)
