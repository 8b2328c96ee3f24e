"""Reads the memory-mapped token datasets of LiBai (and Megatron-LM): PREFIX.bin and PREFIX.idx.

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

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from oneflow_accel.errors import DataError

import numpy as np

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

    Takes the place of libai's `MMapIndexedDataset` in its `GPT2Dataset`; arrays are read-only views
    of the file, of its dtype. It can be pickled (the other process opens the files again) and used
    after a fork.

    Raises DataError where a file is missing, damaged, of another format, or has ids from
    `vocab_size` on, if given. Ids of a `.bin` above 128 MiB (16-bit ids) are checked in 64 pieces
    spread over it; `check_ids` checks all.
    """

    supports_prefetch = False

    def __init__(self, prefix: str | os.PathLike[str], vocab_size: int | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        _check_present(self.prefix)
        index = index_file(self.prefix)
        self.dtype, sequences, documents = _read_header(index)
        # Arrays, not views of the file, where the numbers stand at odd addresses. They take 12
        # bytes per sequence and 8 per document, which forked processes share.
        with index.open("rb") as file:
            file.seek(HEADER.size)
            self._sizes = np.fromfile(file, "<i4", sequences)
            self._pointers = np.fromfile(file, "<i8", sequences)
            self._doc_idx = np.fromfile(file, "<i8", documents)
        _check_index(index, self._sizes, self._pointers, self._doc_idx, self.dtype.itemsize)
        self.tokens = int(self._sizes.sum(dtype=np.int64))
        data = data_file(self.prefix)
        wanted, found = self.tokens * self.dtype.itemsize, data.stat().st_size
        if found != wanted:
            how = "truncated" if found < wanted else "too long, or of another dataset"
            raise DataError(
                f"{data} has {found:,} bytes, but {index} counts {self.tokens:,} tokens of "
                f"{self.dtype.itemsize} bytes, which are {wanted:,}: it is {how}. {AGAIN}"
            )
        # An empty file cannot be mapped. The mapping is held as a plain array: slices of a memmap
        # carry attributes along, which costs more than the reading.
        mapped = np.memmap(data, dtype=self.dtype, mode="r") if found else np.empty(0, self.dtype)
        self._ids = np.asarray(mapped)
        if vocab_size is not None:
            self.check_ids(vocab_size, everywhere=False)

    def __reduce__(self) -> tuple[type[MMapTokenDataset], tuple[str, int | None]]:
        return type(self), (self.prefix, self.vocab_size)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, int32 (n,)."""
        return self._sizes

    @property
    def doc_idx(self) -> np.ndarray:
        """First sequence of each document, then the number of sequences; int64 (documents + 1,)."""
        return self._doc_idx

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        """The ids of a sequence, or of several."""
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return self.get(index)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.get(index) for index in range(len(self)))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids of one sequence from token `offset` on; IndexError where it is too short."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix}: no sequence {index}, there are {len(self)}")
        size = int(self._sizes[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{self.prefix}: sequence {index} has {size} tokens, {offset} .. "
                f"{offset + length} were asked for"
            )
        start = int(self._pointers[index]) // self.dtype.itemsize + int(offset)
        return self._ids[start : start + int(length)]

    def check_ids(self, vocab_size: int, everywhere: bool = True) -> None:
        """Check that all ids are below `vocab_size`, or those in 64 pieces of a million unless
        `everywhere`; the DataError names the first sequence with a larger one."""
        ids = self._ids
        starts: Sequence[int] = range(0, self.tokens, _PIECE)
        if not everywhere and len(starts) > _PIECES_TO_CHECK:
            starts = np.linspace(0, self.tokens - _PIECE, _PIECES_TO_CHECK).astype(int).tolist()
        for start in starts:
            piece = ids[start : start + _PIECE]
            if piece.min() >= 0 and piece.max() < vocab_size:
                continue
            at = start + int(np.argmax((piece < 0) | (piece >= vocab_size)))
            ends = self._pointers // self.dtype.itemsize + self._sizes
            sequence = int(np.searchsorted(ends, at, side="right"))
            raise DataError(
                f"{data_file(self.prefix)}: sequence {sequence} has the id {ids[at]}, the "
                f"vocabulary ends at {vocab_size - 1}: the file is damaged, or was made with "
                f"another vocabulary. {AGAIN}, with the --vocab-file and --merges-file of the model"
            )


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
            raise DataError(
                f"{path} does not exist, though {other} does: making the dataset was stopped, or "
                f"the file was lost. {AGAIN}"
            )
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


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """dtype, number of sequences and length of the document index, matched with the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if raw.startswith(CACHED_MAGIC):
        raise DataError(
            f"{path} is of the older format that LiBai calls lazy or cached, not mmap. Open it "
            'with data_impl="cached", or make it again with --dataset-impl mmap'
        )
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise DataError(
            f"{path} is not the index of a dataset: it begins with {raw[:9]!r}, not {MAGIC!r}. "
            f"{AGAIN}"
        )
    if len(raw) < HEADER.size:
        raise DataError(
            f"{path} is truncated: {size} bytes, the header alone has {HEADER.size}. {AGAIN}"
        )
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise DataError(f"{path} has version {version} of the format, known is 1. {AGAIN}")
    if code not in DTYPES or DTYPES[code].kind == "f":
        raise DataError(f"{path}: dtype code {code} is none for token ids. {AGAIN}")
    wanted = HEADER.size + 12 * sequences + 8 * documents
    if size != wanted:
        how = "truncated" if size < wanted else "damaged"
        raise DataError(
            f"{path} is {how}: its header says {sequences:,} sequences and {documents:,} document "
            f"marks, which take {wanted:,} bytes; it has {size:,}. {AGAIN}"
        )
    return DTYPES[code], sequences, documents


def _check_index(
    path: Path, sizes: np.ndarray, pointers: np.ndarray, doc_idx: np.ndarray, itemsize: int
) -> None:
    address = 0
    for start in range(0, len(sizes), _PIECE):
        piece = sizes[start : start + _PIECE].astype(np.int64)
        if piece.min() < 0:
            at = start + int(piece.argmin())
            raise DataError(f"{path}: sequence {at} has {sizes[at]} tokens. {AGAIN}")
        ends = np.cumsum(piece) * itemsize + address
        begins = ends - piece * itemsize
        wrong = begins != pointers[start : start + _PIECE]
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(
                f"{path}: sequence {start + at} begins at byte {pointers[start + at]}, but the "
                f"sequences before it take {begins[at]}. The file is damaged. {AGAIN}"
            )
        address = int(ends[-1])
    ordered = len(doc_idx) > 0 and doc_idx[0] == 0 and doc_idx[-1] == len(sizes)
    if not ordered or (np.diff(doc_idx) < 0).any():
        raise DataError(
            f"{path}: the {len(doc_idx)} document marks do not run from 0 to {len(sizes)}, the "
            f"number of sequences. The file is damaged, or its making was stopped. {AGAIN}"
        )
