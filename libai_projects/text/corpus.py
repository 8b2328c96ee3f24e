"""From text files to datasets: reads blocks of whole lines, has workers encode them, writes and
counts; and what the commands that do so share.

A line ends with "\\n" only: what Unicode also calls a line end (U+2028, U+0085, form feed) is
part of the text. Memory is bounded by the block and the longest line that is allowed.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Literal, cast

from oneflow_accel import command, machine
from oneflow_accel.errors import DataError

import numpy as np

from flow_train.config.flags import Flags, flag
from flow_train.config.keys import Positive
from flow_train.data.workers import OrderedPool
from flow_train.metrics.console import Progress, format_eta
from libai_projects.text.indexed_dataset import DatasetWriter

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


def check_files(paths: Sequence[Path]) -> None:
    """Check that all files can be opened, before hours of work; the DataError names the first that
    is missing, not a regular file, unreadable or UTF-16."""
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a directory; name the text files in it")
        if not path.exists():
            raise DataError(f"input file {path} does not exist")
        if not path.is_file():
            raise DataError(f"{path} is not a regular file; write it to a file first")
        with _opened(path) as (stream, _):
            head = _read(path, stream.read, 4)
        if head.startswith(_WIDE_MARKS):
            raise DataError(
                f"{path} is UTF-16 or UTF-32 text; convert it with `iconv -f UTF-16 -t UTF-8`"
            )


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
    """Blocks of whole lines, and whether a block is the beginning of a line too long."""
    lines: list[bytes] = []
    size = 0
    # One byte more than a line that is allowed, and its end.
    while line := _read(path, stream.readline, max_line_bytes + 2):
        too_long = len(line.removesuffix(b"\n")) > max_line_bytes
        if lines and (too_long or size >= block_bytes):
            yield b"".join(lines), False
            lines, size = [], 0
        if not too_long:
            lines.append(line)
            size += len(line)
            continue
        yield line[:max_line_bytes], True
        while line and not line.endswith(b"\n"):
            line = _read(path, stream.readline, block_bytes)
    if lines:
        yield b"".join(lines), False


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


def _read(path: Path, read: Callable[[int], bytes], count: int) -> bytes:
    try:
        return read(count)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: its gzip data is truncated or damaged ({error}); get the file again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


# Of a block and of the whole so many bad lines are described; all are counted.
_DESCRIBED = 10

Encode = Callable[[list[str]], list[list[int]]]
SplitSentences = Callable[[str], Sequence[str]]


@dataclass
class Documents:
    """Encoded documents: `ids` (tokens,) back to back; `sizes` (sequences,) int32, in tokens;
    `lengths` (documents,) int32, in sequences; `line_numbers` (documents,) int64."""

    ids: np.ndarray
    sizes: np.ndarray
    lengths: np.ndarray
    line_numbers: np.ndarray


@dataclass
class EncodedBlock:
    """What `block`, here without its data, came to: empty lines, bad ones, and the documents of
    each output."""

    block: LineBlock
    empty: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    outputs: dict[str, Documents] = field(default_factory=dict)

    def note(self, number: int, reason: str) -> None:
        self.bad += 1
        if len(self.first_bad) < _DESCRIBED:
            self.first_bad.append(f"{self.block.path}:{number}: {reason}")


@dataclass(frozen=True)
class BlockEncoder:
    """Encodes blocks of lines: bad lines are counted and described, not raised.

    Attributes:
        keys: JSON key of each text to take -> name of its output; plain lines go to the first one.
        eod_id: appended to each document with a token; None appends nothing.
        strip: take white space off both ends of each text.
        split_sentences: cuts a text into the sequences of its document.
        held_out: share of the texts, 0 .. 1, for the output `held_out_name`. A text's side follows
            from its content and `seed` alone: copies of it stay together, on any number of
            processes.
    """

    encode: Encode
    dtype: np.dtype
    keys: Mapping[str, str]
    eod_id: int | None = None
    strip: bool = False
    split_sentences: SplitSentences | None = None
    held_out: float = 0.0
    held_out_name: str = "held_out"
    seed: int = 0

    def __call__(self, block: LineBlock) -> EncodedBlock:
        """Encode a block; the outputs hold documents in the order of the lines."""
        result = EncodedBlock(replace(block, data=b""))
        names = [*self.keys.values(), *([self.held_out_name] if self.held_out else [])]
        texts: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
        if block.too_long:
            result.note(block.first_line, "longer than --max-line-bytes")
        lines = [] if block.too_long else block.data.removesuffix(b"\n").split(b"\n")
        for number, raw in enumerate(lines, start=block.first_line):
            try:
                found = self._texts_of_line(raw.decode("utf-8").removesuffix("\r"), block.jsonl)
            except UnicodeDecodeError as error:
                result.note(number, f"not UTF-8 (byte {error.start + 1} of the line)")
            except ValueError as error:
                result.note(number, str(error))
            else:
                result.empty += not found
                for name, text in found.items():
                    texts[self._output(name, text)].append((number, text))
        result.outputs = {name: self._encoded(numbered) for name, numbered in texts.items()}
        return result

    def _texts_of_line(self, line: str, jsonl: bool) -> dict[str, str]:
        """Output -> text, without those of white space; a ValueError says why the line is bad."""
        if not line or line.isspace():
            return {}
        found = _json_texts(line, self.keys) if jsonl else {next(iter(self.keys.values())): line}
        if any("\0" in text for text in found.values()):
            raise ValueError("has a NUL character, so it is not text")
        if self.strip:
            found = {name: text.strip() for name, text in found.items()}
        return {name: text for name, text in found.items() if text and not text.isspace()}

    def _output(self, name: str, text: str) -> str:
        if not self.held_out:
            return name
        key = self.seed.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=key).digest()
        drawn = int.from_bytes(digest, "little")
        return self.held_out_name if drawn < int(self.held_out * 2**64) else name

    def _encoded(self, numbered: list[tuple[int, str]]) -> Documents:
        cut = self.split_sentences or (lambda text: [text])
        split = [cut(text) for _, text in numbered]
        sentences = list(chain.from_iterable(split))
        encoded = iter(self.encode(sentences) if sentences else [])
        sequences: list[list[int]] = []
        lengths: list[int] = []
        lines: list[int] = []
        for (number, _), those in zip(numbered, split, strict=True):
            document = [ids for ids in islice(encoded, len(those)) if ids]
            if not document:
                continue
            if self.eod_id is not None:
                document[-1] = [*document[-1], self.eod_id]
            sequences += document
            lengths.append(len(document))
            lines.append(number)
        sizes = np.fromiter(map(len, sequences), np.int32, len(sequences))
        ids = np.fromiter(chain.from_iterable(sequences), self.dtype, int(sizes.sum()))
        return Documents(ids, sizes, np.array(lengths, np.int32), np.array(lines, np.int64))


def _json_texts(line: str, keys: Mapping[str, str]) -> dict[str, str]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    found: dict[str, str] = {}
    for key, name in keys.items():
        if key not in value:
            others = ", ".join(map(repr, list(value)[:5])) or "none"
            raise ValueError(f"has no key {key!r}; it has {others[:100]}")
        text = value[key]
        if not isinstance(text, str):
            raise ValueError(f"key {key!r} is a {type(text).__name__}, not a text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"key {key!r} has half a surrogate pair") from error
        found[name] = text
    return found


# Seconds between two lines of progress where there is no terminal for a bar.
_LOG_SECONDS = 10.0
_KILO = 1000
_PERCENTILES = (5, 25, 50, 75, 95, 99)


class ReadOptions(Flags):
    """How input files are read, as options of a command."""

    bad_lines: Literal["skip", "error"] = flag("skip", group=("reading and encoding",))
    """lines that are not UTF-8, not JSON, have no such key, are too long, or have a NUL: count
    them, or stop"""
    max_line_bytes: Positive = flag(LINE_BYTES, "N", "a longer line is bad")
    workers: Positive = flag(machine.cores(), "N", "processes that encode")
    strip: bool = flag(False, text="take white space off both ends of each text")


@dataclass
class OutputCounts:
    """Documents and tokens of one dataset: `histogram` (longest + 1,) int64 counts documents by
    tokens; `longest` is tokens, file and line of the longest."""

    documents: int = 0
    tokens: int = 0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    longest: tuple[int, str, int] | None = None

    def add(self, path: str, documents: Documents) -> None:
        if not len(documents.lengths):
            return
        first = np.concatenate([[0], np.cumsum(documents.lengths[:-1])])
        tokens = np.add.reduceat(documents.sizes.astype(np.int64), first)
        self.documents += len(tokens)
        self.tokens += len(documents.ids)
        counted = np.bincount(tokens, minlength=len(self.histogram))
        counted[: len(self.histogram)] += self.histogram
        self.histogram = counted
        at = int(tokens.argmax())
        if self.longest is None or tokens[at] > self.longest[0]:
            self.longest = (int(tokens[at]), path, int(documents.line_numbers[at]))

    def percentiles(self) -> dict[int, int]:
        """Percent -> the smallest length that so many documents do not exceed (nearest rank)."""
        below = np.cumsum(self.histogram)
        ranks = {percent: -(-percent * self.documents // 100) for percent in _PERCENTILES}
        return {percent: int(np.searchsorted(below, rank)) for percent, rank in ranks.items()}


@dataclass
class CorpusReport:
    """Counts of what was read; a line is empty, bad, or gives a document to an output or more."""

    lines: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    outputs: dict[str, OutputCounts] = field(default_factory=dict)
    # By file: how many lines are not empty, and how many of these are bad.
    _of_file: dict[str, tuple[int, int]] = field(default_factory=dict)

    def not_text(self) -> str | None:
        """A sentence about the first file of which most lines are bad, None if there is none."""
        for path, (filled, bad) in self._of_file.items():
            if 2 * bad > filled:
                first = next((f", such as {line}" for line in self.first_bad), "")
                return f"{path} is not text: {bad:,} of its {filled:,} lines are bad{first}"
        return None

    def add(self, encoded: EncodedBlock) -> None:
        block = encoded.block
        filled, bad = self._of_file.get(block.path, (0, 0))
        self._of_file[block.path] = (filled + block.lines - encoded.empty, bad + encoded.bad)
        self.lines += block.lines
        self.empty += encoded.empty
        self.bad += encoded.bad
        self.first_bad += encoded.first_bad[: _DESCRIBED - len(self.first_bad)]
        for name, documents in encoded.outputs.items():
            self.outputs.setdefault(name, OutputCounts()).add(block.path, documents)

    @property
    def documents(self) -> int:
        return sum(counts.documents for counts in self.outputs.values())

    @property
    def tokens(self) -> int:
        return sum(counts.tokens for counts in self.outputs.values())

    def to_json(self) -> dict[str, object]:
        """The counts as plain values, for `--report`."""
        return {
            "lines": self.lines,
            "empty": self.empty,
            "bad": self.bad,
            "first_bad": self.first_bad,
            "outputs": {
                name: {
                    "documents": counts.documents,
                    "tokens": counts.tokens,
                    "percentiles": {str(p): n for p, n in counts.percentiles().items()},
                    "longest": dict(zip(("tokens", "file", "line"), counts.longest, strict=True))
                    if counts.longest
                    else None,
                }
                for name, counts in self.outputs.items()
            },
        }

    def text(self, places: dict[str, str]) -> str:
        """The counts for a person; `places` gives each output's path."""
        rows = [f"{self.lines:,} lines: {self.empty:,} empty, {self.bad:,} bad"]
        rows += [f"  bad: {line}" for line in self.first_bad]
        if self.bad > len(self.first_bad):
            rows.append(f"  ... and {self.bad - len(self.first_bad):,} more bad lines")
        for name, counts in self.outputs.items():
            if not counts.documents:
                rows.append(f"{places[name]}: nothing")
                continue
            mean = counts.tokens / counts.documents
            rows.append(
                f"{places[name]}: {counts.documents:,} documents, {counts.tokens:,} tokens, "
                f"{mean:.1f} per document"
            )
            lengths = ", ".join(f"{p} %: {n}" for p, n in counts.percentiles().items())
            rows.append(f"  tokens per document, percentiles  {lengths}")
            if counts.longest:
                tokens, path, line = counts.longest
                rows.append(f"  longest: {tokens:,} tokens, {path}:{line}")
        return "\n".join(rows)


def write_corpus(
    paths: Sequence[Path],
    encoder: BlockEncoder,
    writers: Mapping[str, DatasetWriter],
    options: ReadOptions,
    *,
    jsonl: bool | None = None,
    log_documents: int | None = None,
) -> CorpusReport:
    """Encode the files in order and give each output's documents to its writer, uncommitted; the
    datasets do not depend on the number of workers. `jsonl` None goes by the files' names;
    `log_documents` prints a line of progress each time about so many are done, None every 10
    seconds where there is no bar.

    Raises DataError where a file cannot be read, bad lines are an error or most of a file, nothing
    is left, the disk is full, or a worker was killed.
    """
    sizes = [path.stat().st_size for path in paths]
    report = CorpusReport()
    # The workers start before the progress bar, which has a thread.
    with OrderedPool[LineBlock, EncodedBlock](encoder, options.workers, "text") as pool:
        blocks = read_blocks(paths, jsonl=jsonl, max_line_bytes=options.max_line_bytes)
        with Progress(-(-sum(sizes) // _KILO), "kB") as progress:
            say = _saying(progress, report, log_documents)
            for encoded in pool.map(blocks):
                report.add(encoded)
                if encoded.bad and options.bad_lines == "error":
                    raise DataError(
                        f"{encoded.first_bad[0]}. Mend the line, or count and leave out such lines "
                        "with --bad-lines skip"
                    )
                for name, documents in encoded.outputs.items():
                    writers[name].add(documents.ids, documents.sizes, documents.lengths)
                say(sum(sizes[: encoded.block.file]) + encoded.block.position)
    if not report.documents:
        raise DataError(_nothing(paths, report))
    problem = report.not_text()
    if problem is not None:
        raise DataError(f"{problem}; nothing was written: leave the file out, or mend it")
    return report


def _saying(
    progress: Progress, report: CorpusReport, log_documents: int | None
) -> Callable[[int], None]:
    """What says that so many bytes of the files are read: in the bar, and in lines for log files
    and for `--log-interval`."""
    start = time.monotonic()
    due = log_documents or start + _LOG_SECONDS

    def say(done: int) -> None:
        nonlocal due
        now = time.monotonic()
        seconds = max(now - start, 1e-9)
        said = {
            "documents": f"{report.documents:,}",
            "tokens": f"{report.tokens:,}",
            "lines/s": f"{report.lines / seconds:,.0f}",
            # Before this step, as the bar's own rate.
            "MB/s": f"{progress.done / _KILO / seconds:.2f}",
        }
        progress.update(done // _KILO - progress.done, **said)
        if log_documents is None and sys.stderr.isatty():
            return
        if (now if log_documents is None else report.documents) < due:
            return
        # At most once a block, however small the interval is.
        step = log_documents or _LOG_SECONDS
        due = now + step if log_documents is None else (report.documents // step + 1) * step
        words = ", ".join(f"{value} {name}" for name, value in said.items())
        progress.print(f"{words}, ETA {format_eta(progress.eta_seconds())}")

    return say


def _nothing(paths: Sequence[Path], report: CorpusReport) -> str:
    files = ", ".join(map(str, paths[:3])) + (" ..." if len(paths) > 3 else "")
    why = f"{report.lines} lines, all empty"
    if report.bad:
        why = f"of {report.lines} lines {report.empty} are empty and {report.bad} bad, the first "
        why += report.first_bad[0]
    return f"there is no text in {files}: {why}"


def run_command(name: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code; user errors become one line on standard error.
    SIGTERM and Ctrl-C leave no partly written files."""

    def action() -> int:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            print(f"{name}: stopped; unfinished files were taken away", file=sys.stderr)
            return command.INTERRUPTED

    # SIGTERM must do so too: by default it would end the process at once.
    stops = signal.SIGTERM, signal.SIGINT
    before = {which: signal.signal(which, signal.default_int_handler) for which in stops}
    try:
        return command.run(name, action)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
