"""Turns blocks of lines into token ids; runs in worker processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from libai_projects.text.line_blocks import LineBlock

# So many bad lines of a block are described; all are counted.
_DESCRIBED = 20

Encode = Callable[[list[str]], list[list[int]]]
SplitSentences = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class BadLine:
    """A line that gave no document, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


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
    """What a `LineBlock` came to: empty lines, bad ones, and the documents of each output."""

    file: int
    path: str
    lines: int
    position: int
    empty: int = 0
    bad: int = 0
    first_bad: list[BadLine] = field(default_factory=list)
    outputs: dict[str, Documents] = field(default_factory=dict)


class BlockEncoder:
    """Encodes blocks of lines: bad lines are counted and described, not raised.

    Args:
        keys: JSON key of each text to take -> name of its output; plain lines go to the first one.
        eod_id: appended to each document with a token; None appends nothing.
        strip: take white space off both ends of each text.
        split_sentences: cuts a text into the sequences of its document.
        held_out: share of the texts, 0 .. 1, for the output `held_out_name`. A text's side follows
            from its content and `seed` alone: copies of it stay together, on any number of
            processes.
    """

    def __init__(
        self,
        encode: Encode,
        dtype: np.dtype,
        *,
        keys: Mapping[str, str],
        eod_id: int | None = None,
        strip: bool = False,
        split_sentences: SplitSentences | None = None,
        held_out: float = 0.0,
        held_out_name: str = "held_out",
        seed: int = 0,
    ) -> None:
        self._encode = encode
        self._dtype = dtype
        self._keys = dict(keys)
        self._eod = [] if eod_id is None else [eod_id]
        self._strip = strip
        self._split = split_sentences
        self._held_out_below = int(held_out * 2**64)
        self._held_out_name = held_out_name
        self._hash_key = seed.to_bytes(8, "little", signed=True)

    def __call__(self, block: LineBlock) -> EncodedBlock:
        """Encode a block; the outputs hold documents in the order of the lines."""
        result = EncodedBlock(block.file, block.path, block.lines, block.position)
        texts: dict[str, list[tuple[int, str]]] = {name: [] for name in self._keys.values()}
        if self._held_out_below:
            texts[self._held_out_name] = []
        if block.too_long:
            self._note(result, block.first_line, "longer than --max-line-bytes")
        else:
            self._collect(block, result, texts)
        for name, numbered in texts.items():
            result.outputs[name] = self._encode_documents(numbered)
        return result

    def _collect(
        self, block: LineBlock, result: EncodedBlock, texts: dict[str, list[tuple[int, str]]]
    ) -> None:
        for number, raw in enumerate(_split_lines(block.data), start=block.first_line):
            try:
                line = raw if isinstance(raw, str) else raw.decode("utf-8")
                found = self._texts_of_line(line.removesuffix("\r"), block.jsonl)
            except UnicodeDecodeError as error:
                self._note(result, number, f"not UTF-8 (byte {error.start + 1} of the line)")
                continue
            except ValueError as error:
                self._note(result, number, str(error))
                continue
            if not found:
                result.empty += 1
            for name, text in found.items():
                texts[self._output(name, text)].append((number, text))

    def _texts_of_line(self, line: str, jsonl: bool) -> dict[str, str]:
        """Output -> text, without those of white space; a ValueError says why the line is bad."""
        if not line or line.isspace():
            return {}
        found = _json_texts(line, self._keys) if jsonl else {next(iter(self._keys.values())): line}
        if any("\0" in text for text in found.values()):
            raise ValueError("has a NUL character, so it is no text")
        if self._strip:
            found = {name: text.strip() for name, text in found.items()}
        return {name: text for name, text in found.items() if text and not text.isspace()}

    def _output(self, name: str, text: str) -> str:
        if not self._held_out_below:
            return name
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=self._hash_key).digest()
        drawn = int.from_bytes(digest, "little")
        return self._held_out_name if drawn < self._held_out_below else name

    def _encode_documents(self, numbered: list[tuple[int, str]]) -> Documents:
        if self._split is None:
            sentences = [text for _, text in numbered]
            counts = [1] * len(numbered)
        else:
            split = [self._split(text) for _, text in numbered]
            sentences = list(chain.from_iterable(split))
            counts = [len(cut) for cut in split]
        encoded = iter(self._encode(sentences) if sentences else [])
        sequences: list[list[int]] = []
        lengths: list[int] = []
        lines: list[int] = []
        for (number, _), count in zip(numbered, counts, strict=True):
            document = [ids for ids in (next(encoded) for _ in range(count)) if ids]
            if not document:
                continue
            document[-1] = document[-1] + self._eod
            sequences += document
            lengths.append(len(document))
            lines.append(number)
        sizes = np.fromiter(map(len, sequences), np.int32, len(sequences))
        ids = np.fromiter(chain.from_iterable(sequences), self._dtype, int(sizes.sum()))
        return Documents(ids, sizes, np.array(lengths, np.int32), np.array(lines, np.int64))

    @staticmethod
    def _note(result: EncodedBlock, number: int, reason: str) -> None:
        result.bad += 1
        if len(result.first_bad) < _DESCRIBED:
            result.first_bad.append(BadLine(result.path, number, reason))


def _split_lines(data: bytes) -> Sequence[str | bytes]:
    """The lines without "\\n"; undecoded if one of them is not UTF-8."""
    data = data.removesuffix(b"\n")
    try:
        return data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        return data.split(b"\n")


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
