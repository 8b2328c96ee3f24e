"""Parts of a data set as data sets of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flow_train.data.image_reader import SPLIT_STREAM, Dataset, ReadsMany
from flow_train.data.transforms import Transform


class Subset:
    """Some images of a data set, as a data set, in the order of `indices` (int64)."""

    def __init__(self, dataset: Dataset, indices: np.ndarray) -> None:
        self._dataset = dataset
        self._indices = indices
        self.labels = dataset.labels[indices]

    @property
    def root(self) -> Path | str:
        return self._dataset.root

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, index: int) -> str:
        return self._dataset.name(int(self._indices[index]))

    def shape(self, transform: Transform) -> tuple[int, ...]:
        return self._dataset.shape(transform)

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        return self._dataset.read(int(self._indices[index]), transform, rng)

    def read_many(self, indices: np.ndarray, transform: Transform) -> np.ndarray | None:
        """Many transformed images, where the whole data set can give them in one go."""
        if not isinstance(self._dataset, ReadsMany):
            return None
        return self._dataset.read_many(self._indices[indices], transform)


def split(dataset: Dataset, held_out: int, seed: int) -> tuple[Subset, Subset]:
    """Divide a data set at random into what is left and `held_out` images, each in the data set's
    order; the same division for the same seed. Each class gives its share of what is held out, to
    the nearest image, so that a small split has every class."""
    if not 0 < held_out < len(dataset):
        raise ValueError(f"{held_out} of {len(dataset)} images")
    rng = np.random.default_rng((SPLIT_STREAM, seed))
    shuffled = rng.permutation(len(dataset))
    # By class, in a random order inside it; every (images / held_out)-th of that row is held out.
    by_class = shuffled[np.argsort(dataset.labels[shuffled], kind="stable")]
    places = ((np.arange(held_out) + 0.5) * len(dataset) / held_out).astype(np.int64)
    is_held_out = np.zeros(len(dataset), dtype=bool)
    is_held_out[by_class[places]] = True
    return (
        Subset(dataset, np.flatnonzero(~is_held_out)),
        Subset(dataset, np.flatnonzero(is_held_out)),
    )
