"""Writes that a crash, a kill or a power cut leaves either whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from oneflow_accel.errors import UserError

logger = logging.getLogger("oneflow_accel")

_CHUNK = 1 << 22
# Prefixes of hidden folders: being written, and on their way out. Nothing ever reads them.
TEMPORARY, TRASH = ".tmp-", ".trash-"


class SyncedFile:
    """A new file, written bit by bit, which the disk has when the block ends; `sha256` is then its
    SHA-256 in hexadecimal. On an OSError (disk full, no permission) what was written so far is left
    behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()

    def __enter__(self) -> SyncedFile:
        self._file = self._path.open("xb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self._digest.update(chunk)
            self._file.write(chunk)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def writing(what: Path | str, kind: type[UserError] = UserError) -> Iterator[None]:
    """An error of this kind where the system does not let the block write `what`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; free some space or choose another output folder" if full else ""
        raise kind(f"{what} could not be written: {error.strerror or error}{hint}") from error


def write_synced(path: Path, data: bytes) -> str:
    """Write a new file, see `SyncedFile`, and return its SHA-256."""
    with SyncedFile(path) as file:
        file.write(data)
    return file.sha256


def sha256_of(path: Path) -> str:
    """Of a file, read bit by bit."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sync_directory(directory: Path) -> None:
    """Wait until the disk has the directory's entries (creations and renames in it)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Give `path` a new content in one step: readers see the old or the new one, never a mix."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a folder that was written under a hidden name, its files synced, its own name once the
    disk has all of it. OSError where `final` exists, for one."""
    for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        sync_directory(folder)
    os.replace(temporary, final)
    sync_directory(final.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder; what a kill leaves of it is not taken for a whole one."""
    trash = folder.with_name(f"{TRASH}{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash)


def remove_leftovers(directory: Path) -> None:
    for prefix in (TEMPORARY, TRASH):
        for path in directory.glob(f"{prefix}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def take_lock(path: Path) -> IO[bytes] | None:
    """Hold a file of this name until it is closed or the process ends; None where another process
    holds it. It is a POSIX lock, because data workers forked later do not inherit those: it goes
    with this process however it dies. Where the file system has no locks nothing is held."""
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            return None
        logger.info("%s cannot be locked against a second run: %s", path.parent, error)
    return file
