"""Token files: raw ids, uint16 or uint32, one after another, as nanoGPT and llama2.c have them.

PREFIX.bin has no header. PREFIX.json beside it, which our prepare.py writes, says what it is; so
does a PREFIX.idx, as LiBai's datasets have their ids in such a file too.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from oneflow_accel.errors import DataError, UserError, did_you_mean

import numpy as np

from flow_train.files import replace_file
from libai_projects.text.indexed_dataset import first_outside, index_file, read_header

HELD_OUT_SUFFIX = "_valid"
PACKINGS = ("stream", "documents")
DTYPES = ("uint16", "uint32")
_IGNORED = -100


@dataclass(frozen=True)
class Description:
    """What PREFIX.json says of PREFIX.bin; an id is None where the tokenizer has no such token."""

    dtype: str
    tokens: int
    documents: int
    vocab_size: int
    tokenizer: str
    eod_id: int | None = None
    pad_id: int | None = None

    def write(self, file: Path) -> None:
        """Beside a token file."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        replace_file(file.with_suffix(".json"), text.encode())


def files_of(path: str) -> list[Path]:
    """The token files of a file, folder or pattern, in order of their names, without what is held
    out beside others; a DataError where there are none."""
    place = Path(path)
    if place.is_file():
        return [place]
    found = sorted(place.glob("*.bin") if place.is_dir() else map(Path, glob.glob(path)))
    # The .json and .idx beside them match a pattern such as tokens/*, too.
    found = [file for file in found if file.suffix == ".bin"]
    kept = [file for file in found if not file.stem.endswith(HELD_OUT_SUFFIX)]
    # A pattern of held-out files only means them.
    found = kept if place.is_dir() else kept or found
    if not found:
        raise DataError(
            f"there is no token file at {path!r}: name a .bin, a folder of them or a pattern; "
            "projects/Llama/prepare.py makes one of text"
        )
    return found


def held_out(path: str) -> str | None:
    """What `prepare.py --validation` has put beside the files at `path`; None if it has not."""
    place = Path(path)
    if place.is_dir():
        pattern = f"{glob.escape(path)}/*{HELD_OUT_SUFFIX}.bin"
        return pattern if glob.glob(pattern) else None
    beside = place.with_name(f"{place.stem}{HELD_OUT_SUFFIX}.bin")
    # The name of a file may have [ in it, and is not a pattern then.
    there = beside.is_file() if place.is_file() else glob.glob(str(beside))
    return str(beside) if there else None


def describe(path: str) -> Description | None:
    """What the .json of the first file says; None without one. DataError if it is damaged."""
    return _described(files_of(path)[0])


def _described(file: Path) -> Description | None:
    beside = file.with_suffix(".json")
    if not beside.is_file():
        return None
    try:
        said = Description(**json.loads(beside.read_text(encoding="utf-8")))
        if said.dtype not in DTYPES:
            raise ValueError(f"its dtype is {said.dtype!r}, and not one of {', '.join(DTYPES)}")
        for name in ("tokens", "vocab_size", "eod_id", "pad_id"):
            value = getattr(said, name)
            if type(value) is not int and (value is not None or not name.endswith("_id")):
                raise ValueError(f"its {name} is {value!r}, and not a whole number")
        return said
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{beside} does not describe a token file ({error}): make both again, or remove it and "
            "say --token_dtype"
        ) from error


class TokenWindows:
    """Windows of `max_seq_length` tokens, which do not overlap, and the token after each.

    Windows follow each other from the beginning of each file, and neighbours share one token; what
    is left at a file's end is not used. With packing "documents" a window also has the number of
    the document, counted within it, of each of its tokens, so that those packed in a row do not see
    each other; the label of a token that ends one is ignored then. `dtype` is that of files which
    have no .json and no .idx.

    Raises DataError where a file is missing, damaged or too short, has ids from `vocab_size` on, or
    does not say which token ends a document.
    """

    def __init__(
        self,
        path: str,
        max_seq_length: int,
        vocab_size: int | None = None,
        dtype: str = "uint16",
        packing: str = "stream",
    ) -> None:
        for name, value, known in (("dtype", dtype, DTYPES), ("packing", packing, PACKINGS)):
            if value not in known:
                hint = did_you_mean(str(value), known, f"there are {', '.join(known)}")
                raise UserError(f"token files of {name} {value!r}: {hint}")
        self._length = max_seq_length
        files = files_of(path)
        self._ids = [_opened(file, dtype) for file in files]
        windows = [max(len(ids) - 1, 0) // max_seq_length for ids in self._ids]
        if not sum(windows):
            raise DataError(
                f"{path} has {sum(map(len, self._ids))} tokens in {len(files)} files, and one "
                f"sequence takes {max_seq_length + 1}: add text or shorten the sequences"
            )
        self._ends = np.cumsum(windows)
        self._eod: int | None = None
        if packing == "documents":
            said = _described(files[0])
            if said is None or said.eod_id is None:
                raise DataError(
                    f"{files[0]} has no .json that says which token ends a document, as "
                    "packing=documents needs it: make it by prepare.py, or take packing=stream"
                )
            self._eod = said.eod_id
        for file, ids in zip(files, self._ids, strict=True) if vocab_size is not None else ():
            at = first_outside(ids, vocab_size)
            if at is not None:
                raise DataError(
                    f"{file}: token {at} has the id {ids[at]}, and the model's vocabulary ends at "
                    f"{vocab_size - 1}: give --vocab_size=0 to take the data's, and look whether "
                    "--token_dtype is right"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def window(self, index: int) -> np.ndarray:
        """The max_seq_length + 1 tokens of a window, int64."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        first = index - (int(self._ends[file - 1]) if file else 0)
        begin = first * self._length
        return self._ids[file][begin : begin + self._length + 1].astype(np.int64)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Inputs, labels and, with packing "documents", numbers of documents, each int64
        (max_seq_length,)."""
        tokens = self.window(index)
        inputs, labels = tokens[:-1], tokens[1:].copy()
        if self._eod is None:
            return inputs, labels, None
        ends = inputs == self._eod
        labels[ends] = _IGNORED
        # A token that ends a document is the last of it.
        return inputs, labels, np.cumsum(ends) - ends


def _opened(file: Path, dtype: str) -> np.ndarray:
    """The ids of a file, mapped."""
    said, index = _described(file), index_file(os.fspath(file.with_suffix("")))
    if said is not None:
        dtype = said.dtype
    elif index.is_file():
        dtype = read_header(index)[0].name
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size % width or (said is not None and size != said.tokens * width):
        wanted = f"{said.tokens:,} of {width}" if said else f"a multiple of {width}"
        raise DataError(
            f"{file} has {size:,} bytes, and {wanted} are expected for {dtype}: it is truncated, "
            "or of another dtype"
        )
    # A file without a byte cannot be mapped.
    return np.asarray(np.memmap(file, dtype, "r")) if size else np.empty(0, dtype)
