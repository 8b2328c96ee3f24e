"""What one worker process does: pick the samples of a batch, decode and transform them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Protocol

from oneflow_accel.training.transforms import Transform
from oneflow_accel.training.workers import FilledRows

import numpy as np
from PIL import Image

# What PIL raises on files that are truncated, damaged, or no images.
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
_ORDER_STREAM, _AUGMENTATION_STREAM, SYNTHETIC_STREAM = 1, 2, 3


class Dataset(Protocol):
    """What the loader reads from; `images.ImageFolder` and `images.SyntheticImages` are such."""

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


def max_bad_files(images: int) -> int:
    """How many files of a data set may be undecodable: 1 %, rounded down."""
    return images // 100


class ImageReader:
    """Fills rows with samples; runs in the worker processes, or in this one without any."""

    def __init__(
        self,
        dataset: Dataset,
        transform: Transform,
        seed: int,
        train: bool,
        batch_size: int,
        rank: int,
        world_size: int,
        channels_last: bool,
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self.train = train
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.channels_last = channels_last
        self.rows = len(self.order(0))
        shape = dataset.shape(transform)
        self.sample_shape = shape if channels_last else (shape[2], shape[0], shape[1])
        self._order_of: tuple[int, np.ndarray] | None = None
        self._bad: dict[int, str] = {}

    def order(self, epoch: int) -> np.ndarray:
        """Indices of this rank's samples in the order of one epoch."""
        if not self.train:
            return np.arange(self.rank, len(self.dataset), self.world_size)
        permutation = np.random.default_rng((_ORDER_STREAM, self.seed, epoch)).permutation(
            len(self.dataset)
        )
        batches = len(self.dataset) // (self.batch_size * self.world_size)
        parts = permutation[: batches * self.world_size * self.batch_size]
        return parts.reshape(batches, self.world_size, self.batch_size)[:, self.rank].ravel()

    def fill(self, epoch: int, start: int, rows: np.ndarray) -> FilledRows:
        """Fill `rows` with the samples at positions `start`, `start + 1`, ... of the epoch."""
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = (epoch, self.order(epoch))
        filled = FilledRows([], {})
        for row, index in zip(rows, self._order_of[1][start : start + len(rows)], strict=True):
            filled.indices.append(self._fill_one(epoch, int(index), row, filled.bad))
        return filled

    def _fill_one(self, epoch: int, index: int, row: np.ndarray, bad: dict[int, str]) -> int:
        """Returns the index of the sample that `row` now holds, -1 for none."""
        # With one failure more than allowed the loader stops anyway.
        attempts = max_bad_files(len(self.dataset)) + 1 if self.train else 1
        for offset in range(attempts):
            candidate = (index + offset) % len(self.dataset)
            if candidate not in self._bad:
                rng = np.random.default_rng((_AUGMENTATION_STREAM, self.seed, epoch, index))
                try:
                    array = self.dataset.read(candidate, self.transform, rng)
                except DECODE_ERRORS as error:
                    self._bad[candidate] = str(error) or type(error).__name__
                else:
                    row[...] = array if self.channels_last else array.transpose(2, 0, 1)
                    return candidate
            bad[candidate] = self._bad[candidate]
        return -1
