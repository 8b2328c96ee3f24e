"""Writes token datasets whole or not at all, in the format of `indexed_dataset` and an older
one."""

from __future__ import annotations

import fcntl
import io
import os
import re
from pathlib import Path
from typing import BinaryIO

from oneflow_accel.errors import DataError

import numpy as np
import oneflow as flow

from flow_train.files import sync_directory
from libai_projects.text.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    data_file,
    index_file,
)

# Sequences per piece when the index is written.
_PIECE = 1 << 20
# Files that libai derives from a dataset and keeps beside it: PREFIX_1024msl_sample_idx.npy ...
_DERIVED = re.compile(r"_\d+msl_.*\.npy")


class DatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx; leaving the context without `commit` takes all away.

    Both are written as `.part` files and renamed by `commit`; the index comes last, and without an
    index there is no dataset. A process that is killed leaves the `.part` files, which the next one
    takes over. An older dataset stays whole until the renaming, and whoever has it open goes on
    reading it. Memory: 12 bytes per sequence and 8 per document.

    Raises DataError where the dataset exists, unless `overwrite`, the folder cannot be written to,
    or another process is writing this dataset.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: np.dtype, overwrite: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self._index, self._data = index_file(prefix), data_file(prefix)
        self._index_part = self._index.with_name(self._index.name + ".part")
        self._data_part = self._data.with_name(self._data.name + ".part")
        self._dtype = dtype
        self._code = next(code for code, known in DTYPES.items() if known == dtype)
        self._sizes: list[np.ndarray] = []
        self._documents: list[np.ndarray] = [np.zeros(1, np.int64)]
        self.sequences = 0
        self.tokens = 0
        there = [str(path) for path in (self._index, self._data) if path.exists()]
        if there and not overwrite:
            raise DataError(f"{' and '.join(there)} exist already; --overwrite replaces them")
        self._file = self._open_data()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def add(self, ids: np.ndarray, sizes: np.ndarray, document_lengths: np.ndarray) -> None:
        """Append whole documents: `ids` (tokens,) back to back, `sizes` (sequences,) in tokens,
        `document_lengths` (documents,) in sequences. Raises DataError where the disk fails,
        ValueError where the lengths do not add up."""
        if sizes.sum() != len(ids) or document_lengths.sum() != len(sizes):
            raise ValueError(
                f"{len(ids)} ids, {sizes.sum()} by the sizes; {len(sizes)} sequences, "
                f"{document_lengths.sum()} by the documents"
            )
        try:
            self._file.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        except OSError as error:
            raise self._failed(error) from error
        self._sizes.append(np.asarray(sizes, dtype=np.int32))
        ends = self.sequences + np.cumsum(document_lengths, dtype=np.int64)
        self._documents.append(ends)
        self.sequences += len(sizes)
        self.tokens += len(ids)

    def commit(self) -> None:
        """Give the files their names and close; a DataError leaves an older dataset there."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            with self._index_part.open("wb") as file:
                self._write_index(file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        try:
            # From here to the last renaming there is no dataset, never a mixed one.
            self._index.unlink(missing_ok=True)
            self._remove_derived()
            os.replace(self._data_part, self._data)
            os.replace(self._index_part, self._index)
            sync_directory(self._index.parent)
        except OSError as error:
            raise DataError(
                f"{self.prefix}.bin and .idx cannot be given their names: {error}. There is no "
                "dataset of this prefix now; mend the cause and make it again"
            ) from error
        self._file.close()

    def discard(self) -> None:
        """Take away what was written; does nothing after `commit`."""
        if self._file.closed:
            return
        # Remove first: closing gives the lock away, and then the names may be another process's.
        self._data_part.unlink(missing_ok=True)
        self._index_part.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:
            # Flushing the buffer fails on a full disk; the file is removed already.
            self._file.raw.close()

    def _open_data(self) -> io.BufferedWriter:
        try:
            self._data.parent.mkdir(parents=True, exist_ok=True)
            # Appending does not truncate: the file may be another process's, see the lock.
            file: io.BufferedWriter = io.BufferedWriter(io.FileIO(self._data_part, "ab"), 1 << 20)
        except OSError as error:
            raise self._failed(error) from error
        if not self._is_ours(file):
            file.close()
            raise DataError(
                f"another process is writing {self._data_part}; wait for it, or choose another "
                "--output-prefix"
            )
        file.truncate(0)
        return file

    def _is_ours(self, file: io.BufferedWriter) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # The file system has no locks, so nobody can know.
            return True
        try:
            # Between the opening and the lock its owner may have given it its final name.
            return os.path.samestat(os.fstat(file.fileno()), self._data_part.stat())
        except FileNotFoundError:
            return False

    def _write_index(self, file: BinaryIO) -> None:
        sizes = np.concatenate([np.empty(0, np.int32), *self._sizes])
        documents = np.concatenate(self._documents)
        file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(documents)))
        file.write(sizes.astype("<i4").data)
        address = 0
        for start in range(0, len(sizes), _PIECE):
            piece = sizes[start : start + _PIECE].astype("<i8")
            ends = address + np.cumsum(piece) * self._dtype.itemsize
            file.write((ends - piece * self._dtype.itemsize).astype("<i8").data)
            address = int(ends[-1])
        file.write(documents.astype("<i8").data)

    def _remove_derived(self) -> None:
        """Sample indices of an older dataset: they would cut the new one at wrong places."""
        name = Path(self.prefix).name
        for path in self._index.parent.glob("*.npy"):
            if path.name.startswith(name) and _DERIVED.fullmatch(path.name[len(name) :]):
                path.unlink()

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"{self.prefix}.bin and .idx cannot be written: {error.strerror}. Nothing was changed; "
            "check the space and the permissions of the folder, or choose another --output-prefix"
        )


class CachedDatasetWriter:
    """LiBai's older format, "lazy" or "cached", by libai's own builder; ids are int32.

    It is slow, a tensor for each sequence, and does not wait for the disk: new datasets should be
    mmap. Raises DataError where the folder cannot be written to.
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
        sequences = iter(np.split(ids, np.cumsum(sizes[:-1])) if len(sizes) else [])
        try:
            for length in document_lengths:
                for _ in range(length):
                    self._builder.add_item(flow.tensor(next(sequences).astype(np.int32)))
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
