"""Writes LiBai's older dataset format, "lazy" or "cached", with libai's own builder."""

from __future__ import annotations

import os
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import oneflow as flow

from libai_projects.text.indexed_dataset import data_file, index_file


class CachedDatasetWriter:
    """Has the interface of `DatasetWriter`. Ids are int32.

    It writes to `.part` files, too, but does not wait for the disk, and is slow: a tensor for each
    sequence. New datasets should be mmap.

    Raises:
        DataError: the folder cannot be written to.
    """

    def __init__(self, prefix: str) -> None:
        from libai.data.data_utils import indexed_dataset

        self.prefix = prefix
        self.sequences = 0
        self._index, self._data = index_file(prefix), data_file(prefix)
        self._parts = [path.with_name(path.name + ".part") for path in (self._data, self._index)]
        try:
            self._data.parent.mkdir(parents=True, exist_ok=True)
            self._builder = indexed_dataset.make_builder(str(self._parts[0]), impl="cached")
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> CachedDatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for part in self._parts:
            part.unlink(missing_ok=True)

    def add(self, ids: np.ndarray, sizes: np.ndarray, document_lengths: np.ndarray) -> None:
        """Append whole documents, as `DatasetWriter.add`."""
        sequences = iter(np.split(ids, np.cumsum(sizes[:-1])) if len(sizes) else [])
        try:
            for length in document_lengths:
                for _ in range(length):
                    sequence = next(sequences).astype(np.int32)
                    self._builder.add_item(flow.tensor(sequence, dtype=flow.int32))
                self._builder.end_document()
        except OSError as error:
            raise self._failed(error) from error
        self.sequences += len(sizes)

    def commit(self) -> None:
        """Give the files their names, the index last."""
        try:
            self._builder.finalize(str(self._parts[1]))
            Path(self._index).unlink(missing_ok=True)
            os.replace(self._parts[0], self._data)
            os.replace(self._parts[1], self._index)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"{self.prefix}.bin and .idx cannot be written: {error.strerror}")
