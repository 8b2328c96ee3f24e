"""Reads and checks the two files of a byte-level BPE vocabulary.

`vocab.json` is one JSON object, token -> id. `merges.txt` has one merge per line, "left right", in
order of priority, after a line "#version: ...". Tokens are written in GPT-2's alphabet, see
`byte_alphabet`, where a space is "Ġ".

Everything is checked before use: a truncated merges file still encodes, but to other ids than the
model learnt, and no later step would notice.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from oneflow_accel.errors import UserError

END_OF_TEXT = "<|endoftext|>"

# Entries that no merge makes and that a vocabulary may hold none the less.
_SPECIAL = re.compile(r"<.+>|\[[A-Z]+\d*\]")

_WHERE = (
    "GPT-2's own files are vocab.json and merges.txt (openai/gpt-2 calls them encoder.json and "
    "vocab.bpe); name them with --vocab-file and --merges-file, or in MAGICPROMPT_VOCAB and "
    "MAGICPROMPT_MERGES"
)


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary: `ids` are 0 .. n - 1, each once; the first of `merges` has priority."""

    ids: dict[str, int]
    merges: list[tuple[str, str]]


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character -> byte, 256 entries (`bytes_to_unicode` of openai/gpt-2, Radford et al. 2019):
    printable Latin-1 stands for itself, the other 68 bytes take characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


def load_vocabulary(vocab_file: str | Path, merges_file: str | Path) -> Vocabulary:
    """Read and check both files; a UserError where one is missing, truncated or not what its name
    says, or the two do not belong together."""
    vocab_path, merges_path = Path(vocab_file), Path(merges_file)
    ids = _read_ids(vocab_path)
    merges = _read_merges(merges_path, ids)
    _check_together(vocab_path, merges_path, ids, merges)
    return Vocabulary(ids, merges)


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{what} {path} does not exist. {_WHERE}") from error
    except IsADirectoryError as error:
        raise UserError(f"{what} {path} is a directory. {_WHERE}") from error
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} {path} is not UTF-8 text (byte {error.start}): truncated, damaged or another "
            "kind of file; get it again"
        ) from error


def _read_ids(path: Path) -> dict[str, int]:
    what = "vocabulary file"
    text = _read_text(path, what)
    if text.startswith("#version"):
        raise UserError(
            f"{what} {path} is a merges file: the two names are the wrong way round, --vocab-file "
            "is the .json"
        )
    if text.startswith("version https://git-lfs"):
        raise UserError(f"{what} {path} is a Git LFS pointer, not the file: run `git lfs pull`")
    try:
        ids = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{what} {path} is not JSON, line {error.lineno}, column {error.colno} of a file of "
            f"{len(text)} characters: {error.msg}. It is truncated or another kind of file; get "
            "it again"
        ) from error
    if not isinstance(ids, dict) or not all(type(value) is int for value in ids.values()):
        hint = ""
        if isinstance(ids, dict) and "model" in ids:
            hint = "; it looks like a tokenizer.json, wanted is the vocab.json beside it"
        raise UserError(f"{what} {path} is not a JSON object of token -> id{hint}")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UserError(
            f"{what} {path}: its {len(ids)} ids are not 0 .. {len(ids) - 1}, each once; the file "
            "is damaged, get it again"
        )
    _check_byte_level(path, ids)
    return ids


def _check_byte_level(path: Path, ids: dict[str, int]) -> None:
    missing = [byte for character, byte in byte_alphabet().items() if character not in ids]
    if missing:
        raise UserError(
            f"vocabulary file {path} is not of a byte-level BPE: {len(missing)} of the 256 "
            f"bytes have no token, the first is 0x{missing[0]:02x}. {_WHERE}"
        )
    if "a</w>" in ids:
        raise UserError(
            f"vocabulary file {path} is CLIP's or of another BPE with end-of-word marks, not "
            f"GPT-2's. {_WHERE}"
        )
    if END_OF_TEXT not in ids:
        raise UserError(
            f"vocabulary file {path} has no {END_OF_TEXT}, which ends each text for GPT-2. {_WHERE}"
        )


def _read_merges(path: Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    what = "merges file"
    text = _read_text(path, what)
    if text.startswith("{"):
        raise UserError(
            f"{what} {path} is JSON: the two names are the wrong way round, --merges-file is the "
            ".txt"
        )
    merges: list[tuple[str, str]] = []
    # Not splitlines(): tokens may hold characters that it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise UserError(
                f"{what} {path}, line {number}: {line[:60]!r} is not two tokens and a space "
                "between them; the file is truncated or another one, get it again"
            )
        left, right = parts
        for token in (left, right, left + right):
            if token not in ids:
                raise UserError(
                    f"{what} {path}, line {number}: the vocabulary has no token {token!r}; the "
                    "two files do not belong together, or one is damaged"
                )
        merges.append((left, right))
    return merges


def _check_together(
    vocab_path: Path, merges_path: Path, ids: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    made = {left + right for left, right in merges}
    never = [
        token
        for token in ids
        if token not in made and token not in byte_alphabet() and not _SPECIAL.fullmatch(token)
    ]
    if never:
        raise UserError(
            f"merges file {merges_path} makes {len(made)} tokens and leaves {len(never)} of "
            f"{vocab_path} that nothing makes, such as {never[0]!r}: it is truncated or of another "
            "vocabulary; get both files again from one place"
        )
