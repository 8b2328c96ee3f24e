"""Counts what went into a dataset: lines, documents, tokens and how long the documents are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from libai_projects.text.encoding import BadLine, Documents, EncodedBlock

_PERCENTILES = (5, 25, 50, 75, 95, 99)
# So many bad lines are kept for the report.
_DESCRIBED = 10


@dataclass
class OutputCounts:
    """Documents and tokens of one dataset.

    Attributes:
        histogram: documents by their number of tokens, (longest + 1,) int64.
        longest: tokens, file and line of the longest document.
    """

    documents: int = 0
    tokens: int = 0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    longest: tuple[int, str, int] | None = None

    def add(self, path: str, documents: Documents) -> None:
        """Count more documents, all of one file."""
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
        """Percent -> the smallest length that this percentage of the documents does not exceed.

        Exact, as all lengths are counted (the nearest-rank definition).
        """
        below = np.cumsum(self.histogram)
        ranks = [-(-percent * self.documents // 100) for percent in percents]
        return {p: int(np.searchsorted(below, r)) for p, r in zip(percents, ranks, strict=True)}


@dataclass
class CorpusReport:
    """Counts of everything that was read.

    Attributes:
        lines: lines read; each is empty, bad, or gives a document to at least one output.
        outputs: output name -> its counts.
    """

    lines: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: list[BadLine] = field(default_factory=list)
    outputs: dict[str, OutputCounts] = field(default_factory=dict)
    # Lines of each file that are not empty, and those of them that are bad.
    _of_file: dict[str, tuple[int, int]] = field(default_factory=dict)

    def not_text(self) -> str | None:
        """A sentence about the first file of which most lines are bad, None if there is none."""
        for path, (filled, bad) in self._of_file.items():
            if 2 * bad > filled:
                first = next((f", such as {line}" for line in self.first_bad), "")
                return f"{path} is no text: {bad:,} of its {filled:,} lines are bad{first}"
        return None

    def add(self, block: EncodedBlock) -> None:
        """Count a block."""
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
        """Documents of all outputs."""
        return sum(counts.documents for counts in self.outputs.values())

    @property
    def tokens(self) -> int:
        """Tokens of all outputs."""
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
