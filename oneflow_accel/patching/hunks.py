"""Applies the hunks of a unified diff to the lines of a file, without fuzz and without offset."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oneflow_accel.errors import PatchError

CONTEXT, REMOVED, ADDED = " ", "-", "+"


class SourceLine(NamedTuple):
    """A line with its line end, and its number in the unpatched file: None if a patch added it."""

    text: str
    number: int | None


@dataclass(frozen=True)
class Hunk:
    """One place that a patch changes.

    Attributes:
        source_index: index of its first line before the patch, from 0.
        target_index: the same after the patch.
        lines: (CONTEXT, REMOVED or ADDED; text with its line end) in order.
    """

    source_index: int
    target_index: int
    lines: tuple[tuple[str, str], ...]


def source_lines(text: str) -> list[SourceLine]:
    """The lines of a file; only a line feed ends a line, as in a diff."""
    # str.splitlines would also split at form feeds, which Python sources may hold.
    return [SourceLine(line, number) for number, line in enumerate(io.StringIO(text), start=1)]


def join(lines: Iterable[SourceLine]) -> str:
    """The text of a file from its lines."""
    return "".join(line.text for line in lines)


def apply_hunks(
    lines: Sequence[SourceLine], hunks: Iterable[Hunk], *, label: str, path: str
) -> list[SourceLine]:
    """The lines of a file after a patch.

    Args:
        lines: the file before the patch.
        hunks: what to change, from top to bottom.
        label: names the patch in errors.
        path: names the file in errors.

    Raises:
        PatchError: a hunk is not found word for word at its very line.
    """
    result: list[SourceLine] = []
    position = 0
    for hunk in hunks:
        result += lines[position : hunk.source_index]
        position = hunk.source_index
        for kind, text in hunk.lines:
            if kind == ADDED:
                result.append(SourceLine(text, None))
                continue
            found = lines[position].text if position < len(lines) else None
            if found != text:
                has = "ends before it" if found is None else f"has {found.rstrip()!r}"
                raise PatchError(
                    f"patch {label} does not fit {path}: line {position + 1} should be "
                    f"{text.rstrip()!r}, but the file {has}. The file is not the one of the pinned "
                    "release: reinstall the package"
                )
            if kind == CONTEXT:
                result.append(lines[position])
            position += 1
    result += lines[position:]
    return result
