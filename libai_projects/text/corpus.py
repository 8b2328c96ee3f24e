"""From text files to datasets: reads blocks, has workers encode them, writes and counts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from oneflow_accel.errors import DataError

import numpy as np

from flow_train.metrics.progress import Progress, format_eta
from libai_projects.text.corpus_report import CorpusReport
from libai_projects.text.encoding import BlockEncoder, EncodedBlock
from libai_projects.text.line_blocks import LINE_BYTES, LineBlock, check_files, read_blocks
from libai_projects.text.worker_pool import WorkerPool

# Seconds between two lines of progress where there is no terminal for a bar.
_LOG_SECONDS = 10.0
_KILO = 1000


class Writer(Protocol):
    """What `DatasetWriter` and `CachedDatasetWriter` have in common."""

    def add(self, ids: np.ndarray, sizes: np.ndarray, document_lengths: np.ndarray) -> None:
        """Append whole documents."""

    def commit(self) -> None:
        """Give the files their names."""


@dataclass(frozen=True)
class ReadOptions:
    """How input files are read.

    Attributes:
        jsonl: True or False for all files; None goes by their names.
        bad_lines: "skip" counts bad lines, "error" stops at the first.
        max_line_bytes: longer lines are bad.
        workers: processes that encode; 1 is this process.
        log_documents: print a line of progress each time about so many documents are done; None
            prints one every 10 seconds, and none beside a bar.
    """

    jsonl: bool | None = None
    bad_lines: str = "skip"
    max_line_bytes: int = LINE_BYTES
    workers: int = 1
    log_documents: int | None = None


def default_workers() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def write_corpus(
    paths: Sequence[Path],
    encoder: BlockEncoder,
    writers: Mapping[str, Writer],
    options: ReadOptions,
) -> CorpusReport:
    """Encode the files and give each output's documents to its writer, which is not committed.

    The datasets do not depend on the number of workers.

    Args:
        paths: input files, in order.
        encoder: its outputs are the keys of `writers`.

    Raises:
        DataError: a file cannot be read, a bad line is there and bad lines are an error, most lines
            of a file are bad, nothing is left, the disk is full, or a worker was killed.
    """
    sizes = [path.stat().st_size for path in paths] if check_files(paths) else [0] * len(paths)
    report = CorpusReport()
    # Before the progress bar, which has a thread.
    with WorkerPool[LineBlock, EncodedBlock](encoder, options.workers) as pool:
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


def commit_all(writers: Mapping[str, Writer]) -> None:
    """Give all datasets their names, after the last of them is complete.

    Raises:
        DataError: as `DatasetWriter.commit`.
    """
    for writer in writers.values():
        writer.commit()


class _Said:
    """Lines of progress, for log files and for `--log-interval`."""

    def __init__(self, progress: Progress, report: CorpusReport, log_documents: int | None) -> None:
        self._progress = progress
        self._report = report
        self._log_documents = log_documents
        self._start = self._last = time.monotonic()
        self._next = log_documents or 0

    def maybe_print(self) -> None:
        """Print a line if it is time for one."""
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
