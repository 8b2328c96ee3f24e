"""Images inside a .tar or .zip archive, read in place."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from oneflow_accel.errors import DataError

import numpy as np
from PIL import Image

from flow_train.data.images import EXTENSIONS, class_numbers
from flow_train.data.transforms import Transform

_SUFFIXES = (".tar", ".zip")


def is_archive(path: Path) -> bool:
    """Whether a data folder is an archive instead: a file called .tar or .zip."""
    return path.suffix.lower() in _SUFFIXES and path.is_file()


@dataclass
class ArchiveImages:
    """The images of one part of an archive, for ImageLoader in place of an ImageFolder.

    Members are PART/CLASS/.../IMAGE, with any folders above PART. A .tar must be uncompressed: an
    image is then read from its place in the file. Members of a .zip may be compressed. Each process
    opens the archive for itself. `labels` are int64, one class index per image.
    """

    path: Path
    root: str
    classes: list[str]
    labels: np.ndarray
    _members: list[tuple[str, int, int]]  # name, place in a .tar, size
    _opened: dict[int, int | zipfile.ZipFile] = field(default_factory=dict)  # by process

    @staticmethod
    def open(path: Path) -> ArchiveIndex:
        """List what is in an archive; DataError names one that cannot be read."""
        return ArchiveIndex(path, _list_members(path))

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.path}:{self._members[index][0]}"

    def shape(self, transform: Transform) -> tuple[int, ...]:
        return transform(Image.new("RGB", (8, 8)), np.random.default_rng(0)).shape

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        """Decode and transform one image: float32, (height, width, channels). Raises one of
        `image_reader.DECODE_ERRORS` if it cannot be decoded."""
        try:
            data = self._bytes(*self._members[index])
        except zipfile.BadZipFile as error:
            raise OSError(str(error)) from error
        with Image.open(io.BytesIO(data)) as image:
            return transform(image, rng)

    def _bytes(self, name: str, place: int, size: int) -> bytes:
        # A forked process must not share the position in a file with its siblings.
        opened = self._opened.get(os.getpid())
        if opened is None:
            is_zip = self.path.suffix.lower() == ".zip"
            opened = zipfile.ZipFile(self.path) if is_zip else os.open(self.path, os.O_RDONLY)
            self._opened[os.getpid()] = opened
        if isinstance(opened, int):
            return os.pread(opened, size, place)
        return opened.read(name)


@dataclass(frozen=True)
class ArchiveIndex:
    """The image members of an archive by part: each one's name, its place in a .tar, and its
    size."""

    path: Path
    members: list[tuple[str, int, int]]

    def has(self, part: str) -> bool:
        return any(_part_and_class(name, part) for name, _, _ in self.members)

    def part(self, part: str, classes: Sequence[str] | None = None) -> ArchiveImages:
        """The images of one part, `classes` as for `ImageFolder`. DataError if there are none, or
        of a class that is not among `classes`."""
        found = []
        for member in self.members:
            name = _part_and_class(member[0], part)
            if name is not None:
                found.append((name, member))
        if not found:
            raise DataError(
                f"{self.path} has no images in a folder '{part}'; expected members such as "
                f"{part}/CLASS/IMAGE.jpg"
            )
        found.sort(key=lambda entry: (entry[0], entry[1][0]))
        folders = sorted({name for name, _ in found})
        classes = folders if classes is None else list(classes)
        numbers = class_numbers(classes, folders, f"{self.path}:{part}")
        labels = np.array([numbers[name] for name, _ in found], dtype=np.int64)
        members = [member for _, member in found]
        return ArchiveImages(self.path, f"{self.path}:{part}", classes, labels, members)


def _list_members(path: Path) -> list[tuple[str, int, int]]:
    try:
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                listed = [(info.filename, 0, info.file_size) for info in archive.infolist()]
        else:
            # "r:" takes no compressed archive, whose members have no place in the file.
            with tarfile.open(path, "r:") as archive:
                listed = [
                    (info.name, info.offset_data, info.size) for info in archive if info.isreg()
                ]
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(
            f"cannot read the archive {path}: {error}; expected an uncompressed .tar or a .zip"
        ) from error
    return [member for member in listed if member[0].lower().endswith(EXTENSIONS)]


def _part_and_class(name: str, part: str) -> str | None:
    """The class of a member of a part; None if it is of another one."""
    folders = PurePosixPath(name).parts[:-1]
    if part not in folders[:-1]:
        return None
    return folders[folders.index(part) + 1]
