"""Reads text files in blocks of whole lines, for other processes to work on.

A line ends with "\n" only: what Unicode also calls a line end (U+2028, U+0085, form feed) is
part of the text. Memory is bounded by the block and the longest line that is allowed.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from oneflow_accel.errors import DataError

# Blocks are so small that several processes share even a small file.
BLOCK_BYTES = 1 << 18
LINE_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
# UTF-32's mark for little endian begins with UTF-16's.
_WIDE_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class LineBlock:
    """Lines of one file that follow one another.

    `file` counts from 0, `first_line` from 1; each line of `data` ends with a newline, but perhaps
    the file's last. `too_long`: the beginning of one line over the limit, the rest left out.
    `position`: bytes of the file (compressed, if it is) read up to here.
    """

    file: int
    path: str
    jsonl: bool
    first_line: int
    lines: int
    data: bytes
    too_long: bool
    position: int


def is_jsonl(path: Path) -> bool:
    """Whether a name says JSON lines: .jsonl, .ndjson or .json, perhaps with .gz after it."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith((".jsonl", ".ndjson", ".json"))


def check_files(paths: Sequence[Path]) -> int:
    """Check that all files can be opened, before hours of work; returns their size in bytes. The
    DataError names the first that is missing, not a regular file, unreadable or UTF-16."""
    total = 0
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a directory; name the text files in it")
        if not path.exists():
            raise DataError(f"input file {path} does not exist")
        if not path.is_file():
            raise DataError(f"{path} is no regular file; write it to a file first")
        with _opened(path) as (stream, _):
            head = _read(path, stream, 4)
        if head.startswith(_WIDE_MARKS):
            raise DataError(
                f"{path} is UTF-16 or UTF-32 text; convert it with `iconv -f UTF-16 -t UTF-8`"
            )
        total += path.stat().st_size
    return total


def read_blocks(
    paths: Sequence[Path],
    *,
    jsonl: bool | None = None,
    max_line_bytes: int = LINE_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[LineBlock]:
    """All lines of UTF-8 files in order, without a byte order mark; gzip is recognized.

    `jsonl` None goes by the files' names. A line above `max_line_bytes` comes as a block of its
    own, cut, with `too_long`. Raises DataError for unreadable files and damaged gzip data.
    """
    for number, path in enumerate(paths):
        as_json = is_jsonl(path) if jsonl is None else jsonl
        with _opened(path) as (stream, raw):
            first_line = 1
            for data, too_long in _cut(path, stream, max_line_bytes, block_bytes):
                if first_line == 1:
                    data = data.removeprefix(codecs.BOM_UTF8)
                lines = 1 if too_long else data.count(b"\n") + (not data.endswith(b"\n"))
                yield LineBlock(
                    number, str(path), as_json, first_line, lines, data, too_long, raw.tell()
                )
                first_line += lines


def _cut(
    path: Path, stream: BinaryIO, max_line_bytes: int, block_bytes: int
) -> Iterator[tuple[bytes, bool]]:
    """Blocks that end with a line, and whether a block is the beginning of a line too long."""
    rest = b""
    while piece := _read(path, stream, block_bytes):
        rest += piece
        end = rest.rfind(b"\n") + 1
        if end:
            yield from _split_long(rest[:end], max_line_bytes)
            rest = rest[end:]
        if len(rest) > max_line_bytes:
            yield rest[:max_line_bytes], True
            rest = _after_line(path, stream, block_bytes)
    if rest:
        yield from _split_long(rest, max_line_bytes)


def _split_long(data: bytes, max_line_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole lines, with lines over the limit as blocks of their own."""
    if len(data) <= max_line_bytes:
        yield data, False
        return
    begin = position = 0
    while position < len(data):
        end = data.find(b"\n", position) + 1 or len(data)
        if end - position > max_line_bytes + 1:
            if begin < position:
                yield data[begin:position], False
            yield data[position : position + max_line_bytes], True
            begin = end
        position = end
    if begin < len(data):
        yield data[begin:], False


def _after_line(path: Path, stream: BinaryIO, block_bytes: int) -> bytes:
    """Skip to the end of the line; returns what was read of the next ones."""
    while piece := _read(path, stream, block_bytes):
        end = piece.find(b"\n")
        if end >= 0:
            return piece[end + 1 :]
    return b""


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The stream of a file's text, and the raw file, for the position in it."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    with raw:
        zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        # GzipFile is a BinaryIO in all but its declared type.
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw
        yield stream, raw


def _read(path: Path, stream: BinaryIO, count: int) -> bytes:
    try:
        return stream.read(count)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: its gzip data is truncated or damaged ({error}); get the file again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
