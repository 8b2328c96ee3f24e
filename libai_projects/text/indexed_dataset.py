"""The memory-mapped token datasets of LiBai (and Megatron-LM), PREFIX.bin and PREFIX.idx: reads
them, and writes them whole or not at all.

All numbers are little endian. `.bin` is token ids back to back. `.idx` is

    9 bytes    "MMIDIDX", 0, 0
    uint64     version, 1
    uint8      code of the ids' dtype, see DTYPES
    uint64     number of sequences, n
    uint64     length of the document index, d
    int32[n]   tokens of each sequence
    int64[n]   byte in `.bin` where each sequence begins
    int64[d]   first sequence of each document; the last entry is n

A document is one or more sequences: its sentences, or the whole text as one.

libai's own class reads the same files without looking at them: a truncated index is a crash, ids of
another vocabulary are another model. Here everything is checked when the dataset is opened; for
seven million sequences that takes half a second.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from oneflow_accel.errors import DataError

import numpy as np

from flow_train.files import sync_directory

MAGIC = b"MMIDIDX\x00\x00"
CACHED_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f4"),
    7: np.dtype("<f8"),
    8: np.dtype("<u2"),
}
# Below this a vocabulary gets 16-bit ids; the number is LiBai's.
_UINT16_VOCABULARY = 65500
# The index is checked in pieces, so that the check needs little memory.
_PIECE = 1 << 20
# In a larger `.bin` only pieces spread over the file are checked.
_PIECES_TO_CHECK = 64

AGAIN = (
    "Make the dataset again: `python projects/MagicPrompt/prepare.py TEXT --output-prefix "
    "PREFIX --overwrite`, or `tools/preprocess_data.py`"
)


def index_file(prefix: str | os.PathLike[str]) -> Path:
    """PREFIX.idx; a dot in the prefix does not begin a suffix."""
    return Path(os.fspath(prefix) + ".idx")


def data_file(prefix: str | os.PathLike[str]) -> Path:
    """PREFIX.bin."""
    return Path(os.fspath(prefix) + ".bin")


def dtype_for_vocabulary(vocab_size: int | None) -> np.dtype:
    """The dtype that LiBai gives the ids of a vocabulary: uint16 below 65500, else int32."""
    if vocab_size is not None and vocab_size < _UINT16_VOCABULARY:
        return DTYPES[8]
    return DTYPES[4]


class MMapTokenDataset:
    """Sequences of token ids, memory mapped: opening reads the index, not the tokens.

    Takes the place of libai's `MMapIndexedDataset` in its `GPT2Dataset`: `sizes` are the tokens of
    each sequence, int32 (n,); `doc_idx` the first sequence of each document, then n, int64
    (documents + 1,). Ids are read-only views of the file, of its dtype. It can be pickled (the
    other process opens the files again) and used after a fork.

    Raises DataError where a file is missing, damaged, of another format, or has ids from
    `vocab_size` on, if given. Ids of a `.bin` above 128 MiB (16-bit ids) are checked in 64 pieces
    spread over it.
    """

    supports_prefetch = False

    def __init__(self, prefix: str | os.PathLike[str], vocab_size: int | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        _check_present(self.prefix)
        index = index_file(self.prefix)
        self.dtype, sequences, documents = read_header(index)
        # Arrays, not views of the file, where the numbers stand at odd addresses. They take 12
        # bytes per sequence and 8 per document, which forked processes share.
        with index.open("rb") as file:
            file.seek(HEADER.size)
            self.sizes = np.fromfile(file, "<i4", sequences)
            self._pointers = np.fromfile(file, "<i8", sequences)
            self.doc_idx = np.fromfile(file, "<i8", documents)
        _check_index(index, self.sizes, self._pointers, self.doc_idx, self.dtype.itemsize)
        self.tokens = int(self.sizes.sum(dtype=np.int64))
        data = data_file(self.prefix)
        wanted, found = self.tokens * self.dtype.itemsize, data.stat().st_size
        if found != wanted:
            how = "truncated" if found < wanted else "too long, or of another dataset"
            raise _damaged(data, f"is {how}: {found:,} bytes, and {index} counts {wanted:,}")
        # An empty file cannot be mapped. The mapping is held as a plain array: slices of a memmap
        # carry attributes along, which costs more than the reading.
        mapped = np.memmap(data, dtype=self.dtype, mode="r") if found else np.empty(0, self.dtype)
        self._ids = np.asarray(mapped)
        if vocab_size is not None:
            self._check_ids(vocab_size)

    def __reduce__(self) -> tuple[type[MMapTokenDataset], tuple[str, int | None]]:
        return type(self), (self.prefix, self.vocab_size)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        """The ids of a sequence, or of several."""
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids of one sequence from token `offset` on; IndexError where it is too short."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix}: no sequence {index}, there are {len(self)}")
        size = int(self.sizes[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{self.prefix}: sequence {index} has {size} tokens, {offset} .. "
                f"{offset + length} were asked for"
            )
        start = int(self._pointers[index]) // self.dtype.itemsize + int(offset)
        return self._ids[start : start + int(length)]

    def _check_ids(self, vocab_size: int) -> None:
        at = first_outside(self._ids, vocab_size)
        if at is None:
            return
        ends = self._pointers // self.dtype.itemsize + self.sizes
        sequence = int(np.searchsorted(ends, at, side="right"))
        what = f"has the id {self._ids[at]} in sequence {sequence}, of a vocabulary that ends at"
        raise _damaged(
            data_file(self.prefix),
            f"{what} {vocab_size - 1}: give the --vocab-file and --merges-file of the model",
        )


def first_outside(ids: np.ndarray, vocab_size: int) -> int | None:
    """Where an id is that is not of a vocabulary, None if there is none; in many ids only pieces
    spread over them are looked at."""
    starts: Sequence[int] = range(0, len(ids), _PIECE)
    if len(starts) > _PIECES_TO_CHECK:
        starts = np.linspace(0, len(ids) - _PIECE, _PIECES_TO_CHECK).astype(int).tolist()
    for start in starts:
        piece = ids[start : start + _PIECE]
        if piece.min() < 0 or piece.max() >= vocab_size:
            return start + int(np.argmax((piece < 0) | (piece >= vocab_size)))
    return None


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}. {AGAIN}")


def get_indexed_dataset(
    data_prefix: str,
    data_impl: str = "mmap",
    skip_warmup: bool = True,
    vocab_size: int | None = None,
) -> Any:
    """The dataset at a prefix; takes the place of libai's function of this name in configs.

    `data_impl` "infer" looks into the file; "lazy" and "cached" are libai's classes. `skip_warmup`
    False reads `.bin` once, so that the first epoch finds it in memory. Raises as
    `MMapTokenDataset`.
    """
    if data_impl == "infer":
        _check_present(data_prefix)
        with index_file(data_prefix).open("rb") as file:
            data_impl = "cached" if file.read(8) == CACHED_MAGIC else "mmap"
    if data_impl in ("lazy", "cached"):
        from libai.data.data_utils import indexed_dataset

        _check_present(data_prefix)
        return indexed_dataset.make_dataset(data_prefix, data_impl)
    if data_impl != "mmap":
        raise DataError(f"data_impl {data_impl!r} is none of mmap, infer, lazy, cached")
    dataset = MMapTokenDataset(data_prefix, vocab_size)
    if not skip_warmup:
        with data_file(data_prefix).open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    return dataset


def _check_present(prefix: str) -> None:
    for path, other in (
        (index_file(prefix), data_file(prefix)),
        (data_file(prefix), index_file(prefix)),
    ):
        if path.is_file():
            continue
        if other.is_file():
            raise _damaged(path, f"does not exist, though {other} does: it was lost, or not made")
        hint = ""
        if Path(prefix).suffix in (".bin", ".idx"):
            hint = f" A prefix has no suffix: {Path(prefix).with_suffix('')}."
        near = sorted(
            str(found.with_suffix("")) for found in Path(prefix).parent.glob("*.idx") if not hint
        )
        if near:
            hint = f" In that folder there is {', '.join(near[:5])}."
        raise DataError(
            f"there is no dataset at {prefix}: neither {path.name} nor {other.name} exists in "
            f"{path.parent}.{hint} Make it with `python projects/MagicPrompt/prepare.py TEXT "
            "--output-prefix PREFIX`, or name another one (MAGICPROMPT_DATA)"
        )


def read_header(path: Path) -> tuple[np.dtype, int, int]:
    """dtype, number of sequences and length of the document index, matched with the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if raw.startswith(CACHED_MAGIC):
        raise DataError(
            f"{path} is of the older format that LiBai calls lazy or cached, not mmap. Open it "
            'with data_impl="cached", or make it again'
        )
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise _damaged(path, f"is not a dataset's index: it begins with {raw[:9]!r}, not {MAGIC!r}")
    if len(raw) < HEADER.size:
        raise _damaged(path, f"is truncated: {size} bytes, the header alone has {HEADER.size}")
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise _damaged(path, f"has version {version} of the format, known is 1")
    if code not in DTYPES or DTYPES[code].kind == "f":
        raise _damaged(path, f"has the dtype code {code}, which is not for token ids")
    wanted = HEADER.size + 12 * sequences + 8 * documents
    if size != wanted:
        how = "truncated" if size < wanted else "damaged"
        raise _damaged(path, f"is {how}: {size:,} bytes, and its header counts {wanted:,}")
    return DTYPES[code], sequences, documents


def _check_index(
    path: Path, sizes: np.ndarray, pointers: np.ndarray, doc_idx: np.ndarray, itemsize: int
) -> None:
    address = 0
    for start in range(0, len(sizes), _PIECE):
        piece = sizes[start : start + _PIECE].astype(np.int64)
        if piece.min() < 0:
            at = start + int(piece.argmin())
            raise _damaged(path, f"is damaged: sequence {at} has {sizes[at]} tokens")
        ends = np.cumsum(piece) * itemsize + address
        begins = ends - piece * itemsize
        wrong = begins != pointers[start : start + _PIECE]
        if wrong.any():
            at = int(wrong.argmax())
            where = f"begins at byte {pointers[start + at]}, not at {begins[at]}"
            raise _damaged(path, f"is damaged: sequence {start + at} {where}")
        address = int(ends[-1])
    ordered = len(doc_idx) > 0 and doc_idx[0] == 0 and doc_idx[-1] == len(sizes)
    if not ordered or (np.diff(doc_idx) < 0).any():
        marks = f"its {len(doc_idx)} document marks do not run from 0 to {len(sizes)}"
        raise _damaged(path, f"is damaged: {marks}, the number of sequences")


# Files that libai derives from a dataset and keeps beside it: PREFIX_1024msl_sample_idx.npy ...
_DERIVED = r"_\d+msl_.*\.npy"


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
        there = [str(path) for path in (self._index, self._data) if path.exists()]
        if there and not overwrite:
            raise DataError(f"{' and '.join(there)} exist already; --overwrite replaces them")
        self._file = self._open_data()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        # After `commit` there is nothing to take away.
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

    def add(self, ids: np.ndarray, sizes: np.ndarray, document_lengths: np.ndarray) -> None:
        """Append whole documents: `ids` (tokens,) back to back, `sizes` (sequences,) in tokens,
        `document_lengths` (documents,) in sequences. Raises DataError where the disk fails,
        ValueError where the lengths do not add up."""
        if sizes.sum() != len(ids) or document_lengths.sum() != len(sizes):
            raise ValueError(
                f"{len(ids)} ids, {sizes.sum()} by the sizes; {len(sizes)} sequences, "
                f"{document_lengths.sum()} by the documents"
            )
        with self._writing():
            self._file.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._sizes.append(np.asarray(sizes, dtype=np.int32))
        ends = self.sequences + np.cumsum(document_lengths, dtype=np.int64)
        self._documents.append(ends)
        self.sequences += len(sizes)

    def commit(self) -> None:
        """Give the files their names and close; a DataError leaves an older dataset there."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            with self._index_part.open("wb") as file:
                self._write_index(file)
                file.flush()
                os.fsync(file.fileno())
        self._publish()
        self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.prefix}.bin and .idx cannot be written: {error.strerror}. Nothing was "
                "changed; check the space and the permissions of the folder, or choose another "
                "--output-prefix"
            ) from error

    def _publish(self) -> None:
        """Give the files their names, the index last."""
        try:
            # From here to the last renaming there is no dataset, never a mixed one.
            self._index.unlink(missing_ok=True)
            # Sample indices of an older dataset would cut the new one at wrong places.
            name = re.escape(self._index.stem)
            for path in self._index.parent.glob("*.npy"):
                if re.fullmatch(name + _DERIVED, path.name):
                    path.unlink()
            os.replace(self._data_part, self._data)
            os.replace(self._index_part, self._index)
            sync_directory(self._index.parent)
        except OSError as error:
            raise DataError(
                f"{self.prefix}.bin and .idx cannot be given their names: {error}. There is no "
                "dataset of this prefix now; mend the cause and make it again"
            ) from error

    def _open_data(self) -> io.BufferedWriter:
        with self._writing():
            self._data.parent.mkdir(parents=True, exist_ok=True)
            # Appending does not truncate: the file may be another process's, see the lock.
            file: io.BufferedWriter = io.BufferedWriter(io.FileIO(self._data_part, "ab"), 1 << 20)
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
