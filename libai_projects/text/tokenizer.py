"""GPT-2's byte-level BPE: text to token ids and back, by the Hugging Face `tokenizers` library.

Nothing is added or taken away: leading spaces stay (libai 0.1.1's own tokenizer strips them), no
prefix space, no clean-up when decoding. "<|endoftext|>" in a user's prompt is text and not the
special token.

`vocab.json` is one JSON object, token -> id. `merges.txt` has one merge per line, "left right", in
order of priority, after a line "#version: ...". Tokens are written in GPT-2's alphabet, see
`byte_alphabet`, where a space is "Ġ". Both files are checked before use: a truncated merges file
still encodes, but to other ids than the model learnt, and no later step would notice.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from oneflow_accel.errors import UserError

# The library's own threads do not survive a fork (data loader workers), so it must not start any;
# whoever wants several cores uses processes. It reads the variable at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers import models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"

# Entries that no merge makes and that a vocabulary may hold none the less.
_SPECIAL = re.compile(r"<.+>|\[[A-Z]+\d*\]")

_WHERE = (
    "GPT-2's own files are vocab.json and merges.txt (openai/gpt-2 calls them encoder.json and "
    "vocab.bpe); name them with --vocab-file and --merges-file, or in MAGICPROMPT_VOCAB and "
    "MAGICPROMPT_MERGES"
)


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character -> byte, 256 entries (`bytes_to_unicode` of openai/gpt-2, Radford et al. 2019):
    printable Latin-1 stands for itself, the other 68 bytes take characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


def load_vocabulary(
    vocab_path: Path, merges_path: Path
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token -> id, ids 0 .. n - 1, each once; and the merges, of which the first has priority.

    Reads and checks both files; a UserError where one is missing, truncated or not what its name
    says, or the two do not belong together.
    """
    ids = _read_ids(vocab_path)
    merges = _read_merges(merges_path, ids)
    _check_together(vocab_path, merges_path, ids, merges)
    return ids, merges


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


class GPT2Tokenizer:
    """GPT-2's tokenizer, also as `cfg.tokenization.tokenizer` of a LiBai config.

    It is immutable, can be pickled, and used in forked processes and by several threads. LiBai's
    configs pass `do_lower_case`, which is ignored, as in LiBai: the vocabulary is cased. Raises
    UserError as `load_vocabulary`.
    """

    # libai's build_tokenizer asks for its "end of document", which separates a dataset's texts.
    eod_token = END_OF_TEXT

    def __init__(
        self,
        vocab_file: str | os.PathLike[str],
        merges_file: str | os.PathLike[str],
        do_lower_case: bool = False,
    ) -> None:
        ids, merges = load_vocabulary(Path(vocab_file), Path(merges_file))
        bpe = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._bpe = bpe
        tokens = sorted(ids, key=ids.__getitem__)
        self._bytes = [_token_bytes(token) for token in tokens]
        self.vocab_size = len(tokens)
        # GPT-2 has one special token: it ends and separates texts, and starts a generation without
        # prompt. Batches that it fills need a mask.
        self.eos_token_id = self.eod_token_id = ids[END_OF_TEXT]
        self.bos_token_id = self.pad_token_id = self.eos_token_id

    def __deepcopy__(self, memo: object) -> GPT2Tokenizer:
        # omegaconf copies what a config holds, and nothing here ever changes.
        return self

    def __len__(self) -> int:
        return self.vocab_size

    def padded_vocab_size(self, multiple: int = 1) -> int:
        """The vocabulary size rounded up to a multiple, which splits evenly over processes."""
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1, not {multiple}")
        return -(-self.vocab_size // multiple) * multiple

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, not stripped; ValueError for half a surrogate pair, not in UTF-8."""
        _check_text(text)
        return self._bpe.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`; a ValueError names the text's position."""
        try:
            encodings = self._bpe.encode_batch_fast(list(texts))
        except TypeError:
            for position, text in enumerate(texts):
                _check_text(text, f"text {position}: ")
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an
        id that is not of this vocabulary, such as a row that only pads the model's embedding."""
        return b"".join(self.token_bytes(i, skip_special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The UTF-8 bytes of one token, which may begin or end within a character."""
        if not 0 <= token_id < len(self._bytes):
            raise ValueError(
                f"token id {token_id} is outside the vocabulary, 0 .. {len(self._bytes) - 1}"
            )
        if skip_special and token_id == self.eos_token_id:
            return b""
        return self._bytes[token_id]

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self)


class StreamDecoder:
    """Text of ids that come one by one, in whole UTF-8 characters: a character may take several
    tokens, whose bytes are held back. All pieces together are what `GPT2Tokenizer.decode` gives."""

    def __init__(self, tokenizer: GPT2Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes, often "" for emoji and many scripts."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if a character was begun and not ended, else ""."""
        return self._utf8.decode(b"", final=True)


def _token_bytes(token: str) -> bytes:
    alphabet = byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    # Special tokens are plain text, for example with a space in them.
    return token.encode("utf-8")


def _check_text(text: str, where: str = "") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}character {error.start} is half a surrogate pair (\\u"
            f"{ord(text[error.start]):04x}), which is no character; the text was decoded wrongly"
        ) from error
