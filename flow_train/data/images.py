"""Image classification data: a folder per class, read by workers in a reproducible order."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from oneflow_accel.errors import DataError

import numpy as np
from PIL import Image

from flow_train.data.image_reader import (
    SYNTHETIC_STREAM,
    Arrangement,
    Dataset,
    ImageReader,
    each_once,
    max_bad_files,
)
from flow_train.data.transforms import Transform
from flow_train.data.workers import FilledRows, WorkerPool

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

logger = logging.getLogger("oneflow_accel")


@dataclass
class Batch:
    """Images and labels of one step of one process.

    Attributes:
        images: float32, (batch, height, width, channels) or (batch, channels, height, width).
        labels: int64, (batch,), class indices; or float32, (batch, classes), probabilities where
            images were mixed.
        indices: int64, (batch,), positions in the data set.
    """

    images: np.ndarray
    labels: np.ndarray
    indices: np.ndarray


# (batch, epoch, number of the batch in the epoch) -> batch
FinishBatch = Callable[[Batch, int, int], Batch]


def contents(dataset: Dataset | None, name: str) -> dict[str, Any]:
    """What makes a data set the same on all machines of a job, by what to call it."""
    if dataset is None:
        return {}
    labels = np.asarray(dataset.labels)
    return {
        f"images of {name}": len(dataset),
        f"classes of {name}": list(getattr(dataset, "classes", ())),
        f"labels of {name}": sha256(labels.tobytes()).hexdigest(),
    }


class _Samples(Sequence[tuple[str, int]]):
    """(path, class index) pairs in three flat buffers: a list of a million tuples would be copied
    page by page into every forked worker as reference counts change."""

    def __init__(self, paths: list[str], labels: list[int]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start = self._ends[position - 1] if position else 0
        path = os.fsdecode(self._bytes[start : self._ends[position]])
        return path, int(self.labels[position])


class ImageFolder:
    """Images in ROOT/CLASS/..., one folder per class, any depth below it.

    `classes` names all classes in the order of their indices, where the folder may have only a part
    of them; None takes its folders, sorted. `samples` are (path, class index) by class and then by
    path. DataError if there is no such folder, it holds no class folders or no images, a class has
    none (unless `allow_empty`), or one is not among `classes`.
    """

    def __init__(
        self, root: Path | str, classes: Sequence[str] | None = None, *, allow_empty: bool = False
    ) -> None:
        self.root = Path(root)
        layout = f"expected {self.root}/CLASS/IMAGE with one folder per class"
        try:
            entries = list(os.scandir(self.root))
        except OSError as error:
            raise DataError(f"no image data at {self.root} ({error.strerror}); {layout}") from error
        folders = sorted(entry.name for entry in entries if entry.is_dir())
        if not folders:
            raise DataError(f"{self.root} has no folders in it; {layout}")
        self.classes = folders if classes is None else list(classes)
        numbers = class_numbers(self.classes, folders, self.root)
        paths: list[str] = []
        labels: list[int] = []
        empty = []
        for name in folders:
            found = _images_under(self.root / name)
            paths += found
            labels += [numbers[name]] * len(found)
            if not found:
                empty.append(name)
        if not paths or (empty and not allow_empty):
            raise DataError(
                f"{len(empty)} of {len(folders)} class folders in {self.root} hold no images "
                f"({', '.join(EXTENSIONS)}): {_first_few(empty)}; {layout}"
            )
        self.samples = _Samples(paths, labels)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def labels(self) -> np.ndarray:
        return self.samples.labels

    def name(self, index: int) -> str:
        return self.samples[index][0]

    def shape(self, transform: Transform) -> tuple[int, ...]:
        """Shape of a transformed image, tried out on a blank one."""
        return transform(Image.new("RGB", (8, 8)), np.random.default_rng(0)).shape

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        """Decode and transform one image: float32, (height, width, 3). Raises one of
        `image_reader.DECODE_ERRORS` if it cannot be decoded."""
        with Image.open(self.samples[index][0]) as image:
            return transform(image, rng)


def require_same_classes(train: Any, other: Any) -> None:
    """DataError, which names some that differ, unless two parts of a data set have the same."""
    if train.classes == other.classes:
        return
    missing = sorted(set(train.classes) ^ set(other.classes))
    raise DataError(
        f"{train.root} has {len(train.classes)} classes and {other.root} {len(other.classes)}; "
        f"only one of them has {_first_few(missing)}. Their class folders have to be the same"
    )


def class_numbers(
    classes: Sequence[str], folders: Sequence[str], root: Path | str
) -> dict[str, int]:
    """Class index by name, in the order of `classes`; DataError if a folder is not among them."""
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in folders if name not in numbers]
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(folders)} class folders in {root} are not among the "
            f"{len(numbers)} classes, such as {_first_few(unknown)}"
        )
    return numbers


class SyntheticImages:
    """A data set of fixed noise, (height, width, channels) each, with random labels; needs no
    disk."""

    # So few images stay in the processor's cache, and reading costs next to nothing.
    _DISTINCT = 16

    def __init__(
        self, images: int, shape: tuple[int, int, int], classes: int = 1000, seed: int = 0
    ) -> None:
        rng = np.random.default_rng((SYNTHETIC_STREAM, seed))
        self.root = "the synthetic data set"
        self.classes = [f"class {label}" for label in range(classes)]
        self.labels = rng.integers(classes, size=images, dtype=np.int64)
        self._pixels = rng.standard_normal((min(images, self._DISTINCT), *shape), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"

    def shape(self, transform: Transform) -> tuple[int, ...]:
        return self._pixels.shape[1:]

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        """One image, the same at every call: it is not transformed."""
        return self._pixels[index % len(self._pixels)]


class ImageLoader:
    """Batches of one process out of a data set, the same for any number of workers.

    Training goes through a permutation of the data set that seed and epoch determine. The global
    batch g is its part g of `batch_size * world_size` images, and rank r takes the r-th part of
    that: any world size with the same global batch size sees the same global batches. What does not
    fill a global batch is left out. The augmentation of an image depends on seed, epoch and image
    only.

    Evaluation takes every image once: rank r takes images r, r + world_size, ...; the last batch
    may be short, and ranks may differ by one batch.

    An image that cannot be decoded is named in a warning once and noted in `bad_files` (path ->
    reason). Training takes the next decodable one of the data set instead, evaluation leaves it
    out.

    Args:
        batch_size: images per batch of this process.
        transform: from a PIL image and a random generator to an array (height, width, channels).
        workers: number of processes; 0 reads in this one.
        channels_last: give (batch, height, width, channels) instead of (batch, channels, ...).
        arrangement: which images a rank takes in a training epoch, if not each once as above.
        finish: what each batch goes through at last, in this process, such as mixup.

    Raises:
        DataError: training on fewer images than a global batch. While iterating: more than 1 % of
            the files cannot be decoded, or a worker process died.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        transform: Transform,
        workers: int = 0,
        seed: int = 0,
        train: bool,
        rank: int = 0,
        world_size: int = 1,
        channels_last: bool = False,
        arrangement: Arrangement = each_once,
        finish: FinishBatch | None = None,
    ) -> None:
        if batch_size < 1 or workers < 0 or seed < 0 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size {batch_size}, workers {workers}, seed {seed}, "
                f"rank {rank} of {world_size}"
            )
        if train and len(dataset) < batch_size * world_size:
            raise DataError(
                f"{dataset.root} has {len(dataset)} images, fewer than one global batch of "
                f"{batch_size * world_size}; use a smaller batch size"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.global_batch_size = batch_size * world_size
        self.bad_files: dict[str, str] = {}
        self._workers = workers
        self._reader = ImageReader(
            dataset,
            transform,
            seed,
            train,
            batch_size,
            rank,
            world_size,
            channels_last,
            arrangement,
        )
        self._finish = finish
        self._epoch = 0
        self._start_batch = 0
        self._pool: WorkerPool | None = None

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the epoch of the next iteration, counted from 0; to resume inside an epoch, leave
        out `start_batch` batches at its beginning."""
        if epoch < 0 or not 0 <= start_batch <= len(self):
            raise ValueError(f"epoch {epoch}, batch {start_batch} of {len(self)}")
        self._epoch = epoch
        self._start_batch = start_batch

    def __len__(self) -> int:
        return -(-self._reader.rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        rows, epoch, number = self._reader.rows, self._epoch, self._start_batch
        starts = range(number * self.batch_size, rows, self.batch_size)
        ranges = [(start, min(self.batch_size, rows - start)) for start in starts]
        try:
            for images, filled in self._filled(epoch, ranges):
                self._note_bad(filled.bad)
                indices = np.array(filled.indices, dtype=np.int64)
                present = indices >= 0
                if not present.all():
                    images, indices = images[present], indices[present]
                if len(indices):
                    batch = Batch(images, self.dataset.labels[indices], indices)
                    yield batch if self._finish is None else self._finish(batch, epoch, number)
                number += 1
        except (DataError, RuntimeError):
            self.close()
            raise

    def close(self) -> None:
        """End the worker processes; the next iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # `is_finalizing` is an argument, because this module's own names may be gone when the
    # interpreter ends.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end multiprocessing has ended the workers already.
        if getattr(self, "_pool", None) is not None and not is_finalizing():
            self.close()

    def _filled(
        self, epoch: int, ranges: list[tuple[int, int]]
    ) -> Iterator[tuple[np.ndarray, FilledRows]]:
        shape = self._reader.sample_shape
        if self._workers:
            if self._pool is None:
                self._pool = WorkerPool(self._workers, self._reader.fill, self.batch_size, shape)
            yield from self._pool.batches(epoch, ranges)
            return
        for start, count in ranges:
            images = np.empty((count, *shape), dtype=np.float32)
            yield images, self._reader.fill(epoch, start, images)

    def _note_bad(self, bad: dict[int, str]) -> None:
        for index, reason in bad.items():
            path = self.dataset.name(index)
            if path not in self.bad_files:
                self.bad_files[path] = reason
                logger.warning("cannot decode %s: %s", path, reason)
        if len(self.bad_files) > max_bad_files(len(self.dataset)):
            named = [f"{path} ({reason})" for path, reason in self.bad_files.items()]
            raise DataError(
                f"{len(named)} of the {len(self.dataset)} images in {self.dataset.root} cannot be "
                f"decoded, more than 1 %: {_first_few(named)}; remove or repair them"
            )


def _images_under(folder: Path) -> list[str]:
    """Paths of the images at any depth. A folder that links lead to more than once is read once."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    pending = [os.fspath(folder)]
    while pending:
        directory = pending.pop()
        try:
            status = os.stat(directory)
            # Sort by name, so that the same path is kept on every machine.
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            raise DataError(f"{directory} cannot be read: {error.strerror or error}") from error
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            if entry.is_dir():
                pending.append(entry.path)
            elif entry.name.lower().endswith(EXTENSIONS) and _may_be_read(entry):
                found.append(entry.path)
    return sorted(found)


def _may_be_read(entry: os.DirEntry[str]) -> bool:
    """False for a pipe or a device, whose reading may never end; True for a link to nothing, as
    reading it is an error that names it."""
    # Most entries are files, and the folder's own listing says so.
    if entry.is_file(follow_symlinks=False) or entry.is_file() or not os.path.exists(entry.path):
        return True
    logger.warning("%s is left out: it is not a file", entry.path)
    return False


def _first_few(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
