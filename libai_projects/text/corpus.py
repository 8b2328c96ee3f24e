"""From text files to datasets: reads blocks, has workers encode them, writes, and counts."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from oneflow_accel.errors import DataError

import numpy as np

from flow_train.data.workers import OrderedPool
from flow_train.metrics.progress import Progress, format_eta
from libai_projects.text.encoding import BadLine, BlockEncoder, Documents, EncodedBlock
from libai_projects.text.line_blocks import LINE_BYTES, LineBlock, check_files, read_blocks

# Seconds between two lines of progress where there is no terminal for a bar.
_LOG_SECONDS = 10.0
_KILO = 1000
_PERCENTILES = (5, 25, 50, 75, 95, 99)
# The report keeps at most so many bad lines.
_DESCRIBED = 10


class Writer(Protocol):
    """What `DatasetWriter` and `CachedDatasetWriter` have in common."""

    def add(self, ids: np.ndarray, sizes: np.ndarray, document_lengths: np.ndarray) -> None:
        """Append whole documents."""

    def commit(self) -> None:
        """Give the files their names."""


@dataclass(frozen=True)
class ReadOptions:
    """How input files are read.

    `jsonl` None goes by the files' names; `bad_lines` "skip" counts bad lines, "error" stops at the
    first; lines above `max_line_bytes` are bad, too; `workers` are processes, 1 is this one;
    `log_documents` prints a line of progress each time about so many are done, None every 10
    seconds where there is no bar.
    """

    jsonl: bool | None = None
    bad_lines: str = "skip"
    max_line_bytes: int = LINE_BYTES
    workers: int = 1
    log_documents: int | None = None


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

    def percentiles(self, percents: Sequence[int] = _PERCENTILES) -> dict[int, int]:
        """Percent -> the smallest length that so many documents do not exceed (nearest rank)."""
        below = np.cumsum(self.histogram)
        ranks = [-(-percent * self.documents // 100) for percent in percents]
        return {p: int(np.searchsorted(below, r)) for p, r in zip(percents, ranks, strict=True)}


@dataclass
class CorpusReport:
    """Counts of what was read; a line is empty, bad, or gives a document to an output or more."""

    lines: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: list[BadLine] = field(default_factory=list)
    outputs: dict[str, OutputCounts] = field(default_factory=dict)
    # By file: how many lines are not empty, and how many of these are bad.
    _of_file: dict[str, tuple[int, int]] = field(default_factory=dict)

    def not_text(self) -> str | None:
        """A sentence about the first file of which most lines are bad, None if there is none."""
        for path, (filled, bad) in self._of_file.items():
            if 2 * bad > filled:
                first = next((f", such as {line}" for line in self.first_bad), "")
                return f"{path} is no text: {bad:,} of its {filled:,} lines are bad{first}"
        return None

    def add(self, block: EncodedBlock) -> None:
        filled, bad = self._of_file.get(block.path, (0, 0))
        self._of_file[block.path] = (filled + block.lines - block.empty, bad + block.bad)
        self.lines += block.lines
        self.empty += block.empty
        self.bad += block.bad
        self.first_bad += block.first_bad[: _DESCRIBED - len(self.first_bad)]
        for name, documents in block.outputs.items():
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
            "first_bad": [str(line) for line in self.first_bad],
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
    writers: Mapping[str, Writer],
    options: ReadOptions,
) -> CorpusReport:
    """Encode the files in order and give each output's documents to its writer, uncommitted; the
    datasets do not depend on the number of workers.

    Raises DataError where a file cannot be read, bad lines are an error or most of a file, nothing
    is left, the disk is full, or a worker was killed.
    """
    sizes = [path.stat().st_size for path in paths] if check_files(paths) else [0] * len(paths)
    report = CorpusReport()
    # The workers start before the progress bar, which has a thread.
    with OrderedPool[LineBlock, EncodedBlock](encoder, options.workers, "text") as pool:
        blocks = read_blocks(paths, jsonl=options.jsonl, max_line_bytes=options.max_line_bytes)
        total = sum(sizes)
        with Progress(-(-total // _KILO), "kB") as progress:
            started = time.monotonic()
            said = _Said(progress, report, options.log_documents)
            for block in pool.map(blocks):
                report.add(block)
                if block.bad and options.bad_lines == "error":
                    raise DataError(
                        f"{block.first_bad[0]}. Mend the line, or count and leave out such lines "
                        "with --bad-lines skip"
                    )
                for name, documents in block.outputs.items():
                    writers[name].add(documents.ids, documents.sizes, documents.lengths)
                done = sum(sizes[: block.file]) + block.position
                progress.update(done // _KILO - progress.done, **_rates(report, started, progress))
                said.maybe_print()
    if not report.documents:
        raise DataError(_nothing(paths, report))
    problem = report.not_text()
    if problem is not None:
        raise DataError(f"{problem}; nothing was written: leave the file out, or mend it")
    return report


class _Said:
    """Lines of progress, for log files and for `--log-interval`."""

    def __init__(self, progress: Progress, report: CorpusReport, log_documents: int | None) -> None:
        self._progress = progress
        self._report = report
        self._log_documents = log_documents
        self._start = self._last = time.monotonic()
        self._next = log_documents or 0

    def maybe_print(self) -> None:
        documents, now = self._report.documents, time.monotonic()
        if self._log_documents is None:
            if sys.stderr.isatty() or now - self._last < _LOG_SECONDS:
                return
            self._last = now
        elif documents < self._next:
            return
        else:
            # At most once a block, however small the interval is.
            self._next = (documents // self._log_documents + 1) * self._log_documents
        seconds = max(now - self._start, 1e-9)
        self._progress.print(
            f"{documents:,} documents, {self._report.tokens:,} tokens, "
            f"{self._report.lines / seconds:,.0f} lines/s, "
            f"{self._progress.done / _KILO / seconds:.2f} MB/s, "
            f"ETA {format_eta(self._progress.eta_seconds())}"
        )


def _rates(report: CorpusReport, started: float, progress: Progress) -> dict[str, str]:
    """What the bar says beside the remaining time."""
    seconds = max(time.monotonic() - started, 1e-9)
    return {
        "lines": f"{report.lines:,}",
        "lines/s": f"{report.lines / seconds:,.0f}",
        "MB/s": f"{progress.done / _KILO / seconds:.2f}",
    }


def _nothing(paths: Sequence[Path], report: CorpusReport) -> str:
    files = ", ".join(map(str, paths[:3])) + (" ..." if len(paths) > 3 else "")
    if not report.bad:
        return f"there is no text in {files}: {report.lines} lines, all empty"
    return (
        f"there is no text in {files}: of {report.lines} lines {report.empty} are empty and "
        f"{report.bad} bad, the first {report.first_bad[0]}"
    )
