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
# Its name, its place in a .tar, its size.
Member = tuple[str, int, int]


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
    _members: list[Member]
    _opened: dict[int, int | zipfile.ZipFile] = field(default_factory=dict)  # by process

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


def images_of(
    path: Path, members: Sequence[Member], part: str, classes: Sequence[str] | None = None
) -> ArchiveImages:
    """The images of one part of an archive with these members, `classes` as for `ImageFolder`.
    DataError if there are none, or of a class that is not among `classes`."""
    named = ((class_of(member, part), member) for member in members)
    found = sorted((name, member) for name, member in named if name is not None)
    if not found:
        raise DataError(
            f"{path} has no images in a folder '{part}'; expected members such as "
            f"{part}/CLASS/IMAGE.jpg"
        )
    folders = sorted({name for name, _ in found})
    classes = folders if classes is None else list(classes)
    numbers = class_numbers(classes, folders, f"{path}:{part}")
    labels = np.array([numbers[name] for name, _ in found], dtype=np.int64)
    return ArchiveImages(path, f"{path}:{part}", classes, labels, [member for _, member in found])


def list_members(path: Path) -> list[Member]:
    """The images in an archive; DataError names one that cannot be read."""
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


def class_of(member: Member, part: str) -> str | None:
    """The class of a member of a part; None if it is of another one."""
    folders = PurePosixPath(member[0]).parts[:-1]
    if part not in folders[:-1]:
        return None
    return folders[folders.index(part) + 1]
