"""Batches of arrays in memory: the smallest loader there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from oneflow_accel import distributed
from oneflow_accel.errors import DataError

import numpy as np


class ArrayLoader:
    """Gives batches {name: array} of arrays whose first axis is the samples', to each process its
    part of every global batch. Training takes them in an order that seed and epoch determine, and
    leaves out what does not fill a global batch; evaluation takes each sample once, in their order.

    Args:
        batch_size: samples per batch of this process.

    Raises:
        DataError: the arrays differ in length, or make no global batch to train on.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], batch_size: int, *, train: bool, seed: int = 0
    ) -> None:
        self.batch_size = batch_size
        self.global_batch_size = batch_size * distributed.world_size()
        self._arrays, self._train, self._seed = dict(arrays), train, seed
        self._epoch = self._start = 0
        lengths = {len(array) for array in self._arrays.values()}
        self._length = max(lengths, default=0)
        if len(lengths) != 1:
            raise DataError(f"arrays of one length are wanted, and these have {sorted(lengths)}")
        if train and self._length < self.global_batch_size:
            raise DataError(
                f"{self._length} samples are fewer than a global batch of {self.global_batch_size}"
            )

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the epoch of the next iteration, and its first batch, both counted from 0."""
        self._epoch, self._start = epoch, start_batch

    def __len__(self) -> int:
        if self._train:
            return self._length // self.global_batch_size
        own = len(range(distributed.rank(), self._length, distributed.world_size()))
        return -(-own // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        rank, world = distributed.rank(), distributed.world_size()
        if self._train:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(self._length)
            whole = order[: len(self) * self.global_batch_size]
            own = whole.reshape(-1, world, self.batch_size)[:, rank].reshape(-1)
        else:
            own = np.arange(rank, self._length, world)
        for number in range(self._start, len(self)):
            rows = own[number * self.batch_size : (number + 1) * self.batch_size]
            yield {name: array[rows] for name, array in self._arrays.items()}
