"""Which page of the key-value cache belongs to which sequence, and a pass of the model over some
tokens of some of them: numbers on the host, of which tensors are made where the model runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from oneflow_accel.kernels.generation import PAGE

import numpy as np


@dataclass(frozen=True)
class Step:
    """One pass of the model.

    Args:
        ids: (T,) int64, tokens, sequence after sequence.
        positions: (T,) int32, the place of each in its sequence, from 0 on.
        sequences: (T,) int32, its row of `tables`.
        tables: (S, most pages) int32, the pages of each sequence, -1 after its last.
        copies: (n, 2) int32, pages [from, to] to copy first; no page is in both columns.
        last: (R,) int64, of which of the T tokens logits are wanted.
    """

    ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    tables: np.ndarray
    copies: np.ndarray
    last: np.ndarray


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedCache:
    """Sequences and their pages of `PAGE` tokens, which several sequences may share.

    A page that is not full belongs to one sequence alone as soon as that sequence writes: others
    that had it get a copy. Whole pages that were remembered stay as long as nobody needs the room,
    for the next sequence that begins with the same tokens.

    Args:
        capacity: most pages; None: as many as are asked for.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.pages = 0
        """Pages so far; tensors need as many."""
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._holders: list[int] = []
        self._unused: list[int] = []
        self._copies: list[tuple[int, int]] = []
        # Remembered pages by a digest of all tokens up to their end, and those that no sequence
        # has, in the order in which they are given up.
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}

    @property
    def free(self) -> int:
        """Pages that can be had now, those included that are only remembered."""
        if self.capacity is None:
            return sys.maxsize
        return len(self._unused) + len(self._idle) + self.capacity - self.pages

    def add(self, tokens: Sequence[int] = (), share: bool = False) -> tuple[int, int]:
        """A new sequence: its number, and how many of its `tokens` are there already, with `share`:
        whole pages of what another began with, but never the last token, whose logits need it."""
        found: list[int] = []
        if share:
            for digest in _digests(tokens, max(0, len(tokens) - 1) // PAGE):
                page = self._known.get(digest)
                if page is None:
                    break
                found.append(page)
        for page in found:
            self._holders[page] += 1
            self._idle.pop(page, None)
        return self._new(_Sequence(found, len(found) * PAGE)), len(found) * PAGE

    def length(self, number: int) -> int:
        """Tokens that the sequence has room for."""
        return self._sequences[number].length

    def pages_needed(self, counts: Mapping[int, int]) -> int:
        """Pages that `extend` would take for so many tokens more of each sequence."""
        needed, writers = 0, Counter[int]()
        for number, count in counts.items():
            sequence = self._sequences[number]
            needed += -(-(sequence.length + count) // PAGE) - len(sequence.pages)
            if count and sequence.length % PAGE:
                writers[sequence.pages[-1]] += 1
        # Whoever is left alone with a page writes to it.
        return needed + sum(min(n, self._holders[page] - 1) for page, n in writers.items())

    def extend(self, number: int, count: int) -> None:
        """Room for `count` more tokens; `pages_needed` must be free."""
        sequence = self._sequences[number]
        if count and sequence.length % PAGE and self._holders[sequence.pages[-1]] > 1:
            shared, own = sequence.pages[-1], self._take()
            self._holders[shared] -= 1
            self._copies.append((shared, own))
            sequence.pages[-1] = own
        sequence.length += count
        while len(sequence.pages) * PAGE < sequence.length:
            sequence.pages.append(self._take())

    def fork(self, number: int) -> int:
        """The number of a copy of a sequence, which shares its pages."""
        sequence = self._sequences[number]
        for page in sequence.pages:
            self._holders[page] += 1
        return self._new(_Sequence(list(sequence.pages), sequence.length))

    def select(self, numbers: Sequence[int], rows: Sequence[int] | np.ndarray) -> list[int]:
        """Of some sequences, number `rows[i]` as number i: those that occur again are copies, and
        those that do not occur end."""
        kept: list[int] = []
        for row in rows:
            kept.append(self.fork(numbers[row]) if numbers[row] in kept else numbers[row])
        for number in set(numbers).difference(kept):
            self.release(number)
        return kept

    def remember(self, number: int, tokens: Sequence[int]) -> None:
        """From now on sequences that begin as this one may share its whole pages: the keys of these
        `tokens`, its first ones, are written."""
        pages = self._sequences[number].pages
        for page, digest in zip(pages, _digests(tokens, len(tokens) // PAGE), strict=False):
            if digest not in self._known and page not in self._digests:
                self._known[digest] = page
                self._digests[page] = digest

    def release(self, number: int) -> None:
        """The end of a sequence."""
        # The last pages are given up first: without the first ones nobody would find them.
        for page in reversed(self._sequences.pop(number).pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digests:
                    self._idle[page] = None
                else:
                    self._unused.append(page)

    def tables(self, numbers: Sequence[int]) -> np.ndarray:
        """(sequences, most pages) int32, -1 after a sequence's last page."""
        rows = [self._sequences[number].pages for number in numbers]
        table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return table

    def take_copies(self) -> np.ndarray:
        """(n, 2) int32, pages [from, to] to copy before the next token is written and the next
        sequence is released; they are forgotten."""
        copies, self._copies = self._copies, []
        return np.array(copies, np.int32).reshape(-1, 2)

    def _new(self, sequence: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def _take(self) -> int:
        if self._unused:
            page = self._unused.pop()
        elif self._idle and self.pages == self.capacity:
            page = next(iter(self._idle))
            del self._idle[page], self._known[self._digests.pop(page)]
        else:
            page = self.pages
            self.pages += 1
            self._holders.append(0)
        self._holders[page] = 1
        return page


def _digests(tokens: Sequence[int], pages: int) -> list[bytes]:
    """What names each of the first pages: all tokens up to its end."""
    numbers = np.asarray(tokens[: pages * PAGE], np.int64).reshape(pages, PAGE)
    found, known = list[bytes](), sha256()
    for page in numbers:
        known.update(page.tobytes())
        found.append(known.digest())
    return found
