"""Writes that a crash, a kill or a power cut leaves either whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_CHUNK = 1 << 22


def write_synced(path: Path, data: bytes) -> str:
    """Write a new file, wait until the disk has it, and return its SHA-256 in hexadecimal.

    Raises:
        OSError: as the file system reports it (disk full, no permission); what was written so far
            is left behind.
    """
    digest = hashlib.sha256()
    view = memoryview(data)
    with path.open("xb") as file:
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
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
