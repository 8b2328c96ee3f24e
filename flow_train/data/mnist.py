"""MNIST (LeCun, Cortes, Burges 1998) and what else comes in its four IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
from PIL import Image

from flow_train.data.transforms import PlainTransform, Transform

IMAGE_FILES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABEL_FILES = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
# The files' place below the data folder, where torchvision puts them.
_FOLDERS = ("", "MNIST/raw", "mnist")

_UINT8 = 0x08
# A bound far above the largest published set of this form: a header may claim anything.
_MOST_BYTES = 4 << 30


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an IDX file of bytes, gzipped or not (told from the content): two zero bytes, type,
    number of axes, sizes, data. Returns uint8; DataError names a file that cannot be read, is not
    such a file, or is truncated or damaged."""
    advice = "get the file again, such as from a mirror of MNIST"
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            head = file.read(4 + 4 * axes)
            if len(head) < 4 + 4 * axes or head[:4] != bytes((0, 0, _UINT8, axes)):
                raise DataError(
                    f"{path} is not an IDX file of bytes with {axes} axes: it begins with "
                    f"{head[:4].hex(' ') or 'nothing'}; {advice}"
                )
            shape = tuple(int(size) for size in np.frombuffer(head, dtype=">u4")[1:])
            count = math.prod(shape)
            if count > _MOST_BYTES:
                raise DataError(f"{path} claims to hold an array of shape {shape}; {advice}")
            # Ask for one byte too many: reading to the end also checks gzip's checksum.
            data = file.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; {advice}") from error
    if len(data) != count:
        has = "more" if len(data) > count else f"only {len(data)}"
        raise DataError(f"{path} should hold {count} bytes of data and has {has}; {advice}")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


class MnistImages:
    """One part of MNIST in memory, for ImageLoader in place of an ImageFolder.

    `folder` holds the four IDX files, each with .gz or without, or has them in MNIST/raw; `part` is
    "train" (60,000 images) or "test" (10,000, the files t10k); images get black around them up to
    `pad_to`. `labels` are int64 (images,), `pixels` uint8 (images, height, width). DataError if a
    file is missing or damaged, or images and labels do not go together; ValueError if images are
    larger than `pad_to`.
    """

    def __init__(self, folder: Path | str, part: str, pad_to: int | None = None) -> None:
        self.root = Path(folder)
        self._part = part
        image_file = _find(self.root, IMAGE_FILES[part])
        label_file = _find(self.root, LABEL_FILES[part])
        self.pixels = read_idx(image_file, 3)
        labels = read_idx(label_file, 1)
        if len(labels) != len(self.pixels):
            raise DataError(
                f"{image_file} has {len(self.pixels)} images and {label_file} {len(labels)} "
                "labels; they are not of one data set"
            )
        if labels.size and labels.max() > 9:
            raise DataError(f"{label_file} has the label {labels.max()}; labels are 0 to 9")
        self.classes = [str(digit) for digit in range(10)]
        self.labels = labels.astype(np.int64)
        if pad_to is not None:
            self.pixels = _padded(self.pixels, pad_to)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self._part} image {index} of {self.root}"

    def shape(self, transform: Transform) -> tuple[int, ...]:
        return self.read(0, transform, np.random.default_rng(0)).shape

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        """One transformed image: float32, (height, width, channels)."""
        return transform(Image.fromarray(self.pixels[index]), rng)

    def read_many(self, indices: np.ndarray, transform: Transform) -> np.ndarray | None:
        """Images that are only normalized, in one go; None for any other transform."""
        if not isinstance(transform, PlainTransform):
            return None
        pixels = self.pixels[indices][..., None]
        # Broadcasts the one channel where the normalization is one of three.
        return transform.normalization(pixels)


def _find(folder: Path, name: str) -> Path:
    for place in _FOLDERS:
        for suffix in (".gz", ""):
            path = folder / place / (name + suffix)
            if path.is_file():
                return path
    raise DataError(
        f"no {name}.gz in {folder} or {folder / 'MNIST/raw'}; datamodule.data_dir has to be a "
        f"folder with {', '.join([*IMAGE_FILES.values(), *LABEL_FILES.values()])}, with .gz or not"
    )


def _padded(pixels: np.ndarray, size: int) -> np.ndarray:
    """Images of `size` x `size` with the given ones in the middle; an odd rest goes below right."""
    _, height, width = pixels.shape
    if size < max(height, width):
        raise ValueError(f"images of {height} x {width} do not fit into {size} x {size}")
    top, left = (size - height) // 2, (size - width) // 2
    padded = np.zeros((len(pixels), size, size), dtype=np.uint8)
    padded[:, top : top + height, left : left + width] = pixels
    return padded
