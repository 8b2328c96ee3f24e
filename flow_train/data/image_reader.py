"""What one worker process does: pick the samples of a batch, decode and transform them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image

from flow_train.data.transforms import Transform
from flow_train.data.workers import FilledRows

# The errors that PIL raises on files that are truncated, damaged, or not images.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

# First word of every seed, so that no two kinds of random streams coincide.
_ORDER_STREAM, _AUGMENTATION_STREAM, SYNTHETIC_STREAM, MIXING_STREAM, SPLIT_STREAM = range(1, 6)


class Dataset(Protocol):
    """What the loader reads from, such as `images.ImageFolder` and `images.SyntheticImages`."""

    @property
    def root(self) -> Path | str:
        """Where it is, for messages."""

    @property
    def labels(self) -> np.ndarray:
        """int64, class index per image."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What messages call an image."""

    def shape(self, transform: Transform) -> tuple[int, ...]:
        """Shape of what `read` returns: (height, width, channels)."""

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        """One transformed image, float32; raises one of DECODE_ERRORS where that is impossible."""


@runtime_checkable
class ReadsMany(Protocol):
    """A data set that may be able to give many images in one go."""

    def read_many(self, indices: np.ndarray, transform: Transform) -> np.ndarray | None:
        """Transformed images, float32, (images, height, width, channels), or None where they must
        be read one by one, as with any transform that draws random numbers."""


# (permutation of the data set, batch size of a process, rank, world size) -> what that rank takes
# in an epoch: (indices, repetitions). An index that comes several times has a new repetition each
# time, 0 for the first: it is augmented in another way.
Arrangement = Callable[[np.ndarray, int, int, int], tuple[np.ndarray, np.ndarray]]


def each_once(
    permutation: np.ndarray, batch_size: int, rank: int, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rank r takes the r-th part of each global batch; what does not fill one is left out."""
    batches = len(permutation) // (batch_size * world_size)
    parts = permutation[: batches * world_size * batch_size]
    indices = parts.reshape(batches, world_size, batch_size)[:, rank].ravel()
    return indices, np.zeros_like(indices)


@dataclass(frozen=True)
class RepeatedAugmentation:
    """The order of a training epoch (Hoffer et al. 2020, arXiv 1901.09335; as in DeiT).

    Each image of the permutation comes `repeats` times in a row, and these go to the processes in
    turn. An epoch has as many global batches as one without repetitions, so it sees a `repeats`-th
    of the images. It is the `arrangement` of an ImageLoader; any world size with the same global
    batch size sees the same global batches.
    """

    repeats: int

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"{self.repeats} repetitions")

    def __call__(
        self, permutation: np.ndarray, batch_size: int, rank: int, world_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        batches = len(permutation) // (batch_size * world_size)
        total = batches * batch_size * world_size
        needed = -(-total // self.repeats)
        indices = np.repeat(permutation[:needed], self.repeats)[:total]
        repetitions = np.tile(np.arange(self.repeats), needed)[:total]
        return indices[rank::world_size], repetitions[rank::world_size]


def max_bad_files(images: int) -> int:
    """How many files of a data set may be undecodable: 1 %, rounded down."""
    return images // 100


@dataclass
class ImageReader:
    """Fills rows with samples; runs in the worker processes, or in this one without any."""

    dataset: Dataset
    transform: Transform
    seed: int
    train: bool
    batch_size: int
    rank: int
    world_size: int
    channels_last: bool
    arrangement: Arrangement = each_once

    def __post_init__(self) -> None:
        self.rows = len(self.order(0)[0])
        shape = self.dataset.shape(self.transform)
        self.sample_shape = shape if self.channels_last else (shape[2], shape[0], shape[1])
        self._order_of: tuple[int, np.ndarray, np.ndarray] | None = None
        self._bad: dict[int, str] = {}

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of this rank's samples in the order of one epoch, and their repetitions."""
        if not self.train:
            indices = np.arange(self.rank, len(self.dataset), self.world_size)
            return indices, np.zeros_like(indices)
        permutation = np.random.default_rng((_ORDER_STREAM, self.seed, epoch)).permutation(
            len(self.dataset)
        )
        return self.arrangement(permutation, self.batch_size, self.rank, self.world_size)

    def fill(self, epoch: int, start: int, rows: np.ndarray) -> FilledRows:
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = (epoch, *self.order(epoch))
        _, indices, repetitions = self._order_of
        indices, repetitions = (of[start : start + len(rows)] for of in (indices, repetitions))
        if isinstance(self.dataset, ReadsMany):
            images = self.dataset.read_many(indices, self.transform)
            if images is not None:
                rows[...] = images if self.channels_last else images.transpose(0, 3, 1, 2)
                return FilledRows(indices.tolist(), {})
        filled = FilledRows([], {})
        for row, index, repetition in zip(rows, indices, repetitions, strict=True):
            sample = self._fill_one(epoch, int(index), int(repetition), row, filled.bad)
            filled.indices.append(sample)
        return filled

    def _fill_one(
        self, epoch: int, index: int, repetition: int, row: np.ndarray, bad: dict[int, str]
    ) -> int:
        """Returns the index of the sample that `row` now holds, -1 for none."""
        words = (_AUGMENTATION_STREAM, self.seed, epoch, index)
        # With one failure more than allowed the loader stops anyway.
        attempts = max_bad_files(len(self.dataset)) + 1 if self.train else 1
        for offset in range(attempts):
            candidate = (index + offset) % len(self.dataset)
            if candidate not in self._bad:
                rng = np.random.default_rng((*words, repetition) if repetition else words)
                try:
                    array = self.dataset.read(candidate, self.transform, rng)
                except DECODE_ERRORS as error:
                    self._bad[candidate] = str(error) or type(error).__name__
                else:
                    row[...] = array if self.channels_last else array.transpose(2, 0, 1)
                    return candidate
            bad[candidate] = self._bad[candidate]
        return -1
