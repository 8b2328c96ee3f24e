"""LiBai's checkpoints as folders that are whole or not there, and are known to be so when read.

    DIR/model_0000123/model/pickled_data, ...   one folder of `oneflow.save` per component
                      graph/...                 (see oneflow_files)
                      model/checksums.json      size and SHA-256 of every file of the checkpoint
    DIR/last_checkpoint                         the name of the newest numbered checkpoint

A checkpoint is written under a hidden name and renamed when the disk has it. The list of checksums
lies inside `model/` because LiBai reads every entry of a checkpoint as a component. All functions
here act on the files of one process; they call no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from oneflow_accel.errors import CheckpointError

from flow_train.checkpoint import oneflow_files
from flow_train.files import TEMPORARY, publish_folder, remove_leftovers, replace_file

MANIFEST = "model/checksums.json"
LAST = "last_checkpoint"
_NUMBERED = re.compile(r"(?P<prefix>.+)_(?P<iteration>\d{7,})")
# Hidden: the old checkpoint of a name while the new one moves in.
_REPLACED = ".replaced-"


def iteration_of(name: str) -> int | None:
    """The number in a name such as "model_0000123", or None."""
    match = _NUMBERED.fullmatch(name)
    return int(match["iteration"]) if match else None


def numbered(directory: Path) -> dict[int, Path]:
    """The numbered checkpoints in a folder by iteration, oldest first; damaged ones too."""
    found = {}
    if directory.is_dir():
        for entry in directory.iterdir():
            iteration = iteration_of(entry.name)
            if iteration is not None and entry.is_dir() and not entry.name.startswith("."):
                found[iteration] = entry
    return dict(sorted(found.items()))


def begin(directory: Path, name: str) -> Path:
    """A new, empty, hidden folder to write a checkpoint into, after clearing what killed runs
    left."""
    directory.mkdir(parents=True, exist_ok=True)
    _restore_replaced(directory)
    remove_leftovers(directory)
    temporary = directory / f"{TEMPORARY}{name}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, name: str) -> Path:
    """Give a written checkpoint its name, in place of one of the same name, and return its folder.
    If that raises OSError, the checkpoint of that name is as before."""
    files = {}
    for file in sorted(temporary.rglob("*")):
        if file.is_file():
            files[file.relative_to(temporary).as_posix()] = _describe(file, sync=True)
    manifest = temporary / MANIFEST
    manifest.parent.mkdir(exist_ok=True)
    replace_file(manifest, json.dumps({"format": 1, "files": files}, indent=1).encode())
    final = temporary.with_name(name)
    replaced = temporary.with_name(f"{_REPLACED}{name}")
    if final.exists():
        # A folder cannot be renamed onto another one. A kill between the two is mended later.
        os.replace(final, replaced)
    publish_folder(temporary, final)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def tag(directory: Path, name: str) -> None:
    """Name the newest checkpoint in `last_checkpoint`; readers see the old name or the new."""
    replace_file(directory / LAST, name.encode())


def verify(folder: Path, components: Sequence[str] | None = None) -> None:
    """Check that the `components` of a checkpoint (None: all) are whole: by checksums, or, in one
    that LiBai wrote, by sizes. CheckpointError names the file that is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}")
    if not (folder / "model").is_dir():
        raise CheckpointError(f"{folder / 'model'} is missing")
    try:
        if (folder / MANIFEST).is_file():
            _verify_checksums(folder, components)
        else:
            for component in components or sorted(path.name for path in folder.iterdir()):
                oneflow_files.check(folder / component)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def newest_intact(directory: Path) -> Path | None:
    for folder in reversed(numbered(directory).values()):
        try:
            verify(folder)
        except CheckpointError:
            continue
        return folder
    return None


def last(directory: Path) -> Path | None:
    """The checkpoint that `last_checkpoint` names, or the newest numbered one where that name has
    no number ("model_final", as LiBai writes at the end of a run); None where no run has saved
    here. CheckpointError, which says what to do, if it is damaged or not there."""
    _restore_replaced(directory)
    pointer = directory / LAST
    try:
        name = pointer.read_text().strip()
    except FileNotFoundError:
        if numbered(directory):
            raise CheckpointError(f"{pointer} is missing; {_way_out(directory)}") from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from error
    if iteration_of(name) is None or Path(name).name != name:
        intact = newest_intact(directory)
        if intact is None:
            raise CheckpointError(
                f"{pointer} names {name!r}, and only a numbered checkpoint can be resumed from; "
                f"there is no intact one in {directory}: to go on from its weights alone, set "
                f"train.load_weight={directory / name} and leave out --resume"
            )
        return intact
    try:
        verify(directory / name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_way_out(directory)}") from error
    return directory / name


def _restore_replaced(directory: Path) -> None:
    for entry in directory.glob(f"{_REPLACED}*"):
        final = directory / entry.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            os.replace(entry, final)


def _way_out(directory: Path) -> str:
    intact = newest_intact(directory)
    if intact is None:
        return f"no checkpoint in {directory} is intact; restore one, or start without --resume"
    return (
        f"the newest intact checkpoint is {intact.name}: to resume from it, write its name into "
        f"{directory / LAST}"
    )


def _verify_checksums(folder: Path, components: Sequence[str] | None) -> None:
    try:
        files = dict(json.loads((folder / MANIFEST).read_bytes())["files"])
        expected = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is corrupt ({error!r})") from error
    for name, (size, digest) in expected.items():
        if components is not None and Path(name).parts[0] not in components:
            continue
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} is corrupt: it has {file.stat().st_size} bytes where {size} were written"
            )
        if _describe(file)[1] != digest:
            raise CheckpointError(
                f"{file} is corrupt: its checksum is not that of what was written"
            )


def _describe(file: Path, *, sync: bool = False) -> tuple[int, str]:
    """Size in bytes and SHA-256 in hexadecimal."""
    with file.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
        return stream.tell(), digest.hexdigest()
