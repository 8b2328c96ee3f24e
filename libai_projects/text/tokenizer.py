"""Text to token ids and back: GPT-2's byte-level BPE, Hugging Face's tokenizer.json and Google's
tokenizer.model, by the libraries `tokenizers` and `sentencepiece`.

Of GPT-2's nothing is added or taken away: leading spaces stay (libai 0.1.1's own tokenizer strips
them), no prefix space, no clean-up when decoding. "<|endoftext|>" in a user's prompt is text and
not the special token.

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
from typing import Any

from oneflow_accel.errors import UserError

# The library's own threads do not survive a fork (data loader workers), so it must not start any;
# whoever wants several cores uses processes. It reads the variable at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers import models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"

# What makes text of tokens: GPT-2's alphabet, pieces with U+2581 for a space, or BERT's, of which
# those within a word begin with ##.
_DECODERS = ("ByteLevel", "ByteFallback", "Metaspace", "WordPiece")

# Entries that no merge makes and that a vocabulary may hold none the less.
_SPECIAL = re.compile(r"<.+>|\[[A-Z]+\d*\]")

_WHERE = (
    "GPT-2's own files are vocab.json and merges.txt (openai/gpt-2 calls them encoder.json and "
    "vocab.bpe); name them with --vocab-file and --merges-file, or in MAGICPROMPT_VOCAB and "
    "MAGICPROMPT_MERGES"
)
_AGAIN = "the files are truncated or not of one vocabulary; get both again from one place"


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
    for path in (vocab_path, merges_path):
        if not path.is_file():
            raise UserError(f"vocabulary file {path} does not exist. {_WHERE}")
    both = f"vocabulary {vocab_path} with merges {merges_path}"
    try:
        ids, merges = models.BPE.read_file(str(vocab_path), str(merges_path))
        models.BPE(vocab=ids, merges=merges)
    # The library raises bare exceptions.
    except Exception as error:
        raise UserError(
            f"{both} cannot be read ({error}): one is truncated, another kind of file, or in the "
            f"other's place; get both again from one place. {_WHERE}"
        ) from error
    count = len(ids)
    if sorted(ids.values()) != list(range(count)):
        raise UserError(f"{both}: the {count} ids are not 0 .. {count - 1}, each once; {_AGAIN}")
    missing = [character for character in (*byte_alphabet(), END_OF_TEXT) if character not in ids]
    if missing or "a</w>" in ids:
        what = f"has no token {missing[0]!r}" if missing else "has marks for ends of words, as CLIP"
        raise UserError(f"{both}: it is not GPT-2's byte-level BPE, as it {what}. {_WHERE}")
    made = {left + right for left, right in merges} | set(byte_alphabet())
    never = [token for token in ids if token not in made and not _SPECIAL.fullmatch(token)]
    if never:
        raise UserError(
            f"{both}: nothing makes {len(never)} of the tokens, such as {never[0]!r}; {_AGAIN}"
        )
    return ids, merges


class Tokenizer:
    """What all tokenizers here share. They are immutable, can be pickled, and used in forked
    processes and by several threads. `vocab_size` counts special tokens; the ids `bos_token_id`,
    `eos_token_id`, `eod_token_id`, which separates a dataset's texts, and `pad_token_id` may be
    one."""

    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    eod_token_id: int
    pad_token_id: int
    # Of what masked language models see; None of others.
    mask_token_id: int | None = None
    # What a decoded text leaves out, and what each token is in it.
    _special: frozenset[int] = frozenset()
    _bytes: Sequence[bytes]

    def __deepcopy__(self, memo: object) -> Tokenizer:
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
        """Token ids of a prompt, not stripped; ValueError for half a surrogate pair, not in UTF-8.
        A tokenizer whose model reads one begins with its token for that."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Of a dataset's texts, without tokens that begin or end them; a ValueError names the
        text's position."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an
        id that is not of this vocabulary, such as a row that only pads the model's embedding."""
        return b"".join(self.token_bytes(i, skip_special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The UTF-8 bytes of one token, which may begin or end within a character."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id} is outside the vocabulary, 0 .. {self.vocab_size - 1}"
            )
        if skip_special and token_id in self._special:
            return b""
        return self._bytes[token_id]

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self)


class _LibraryTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`; `_begins`: a prompt needs its first token added."""

    _library: tokenizers.Tokenizer
    _begins = False

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        ids = self._library.encode(text, add_special_tokens=True).ids
        return [self.bos_token_id, *ids] if self._begins else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for position, text in enumerate(texts):
                _check_text(text, f"text {position}: ")
            raise
        return [encoding.ids for encoding in encodings]


class GPT2Tokenizer(_LibraryTokenizer):
    """GPT-2's tokenizer, also as `cfg.tokenization.tokenizer` of a LiBai config.

    LiBai's configs pass `do_lower_case`, which is ignored, as in LiBai: the vocabulary is cased.
    Raises UserError as `load_vocabulary`.
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
        self._library = bpe
        tokens = sorted(ids, key=ids.__getitem__)
        self._bytes = [_token_bytes(token) for token in tokens]
        self.vocab_size = len(tokens)
        # GPT-2 has one special token: it ends and separates texts, and starts a generation without
        # prompt. Batches that it fills need a mask.
        self.eos_token_id = self.eod_token_id = ids[END_OF_TEXT]
        self.bos_token_id = self.pad_token_id = self.eos_token_id
        self._special = frozenset([self.eos_token_id])


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A tokenizer.json, of byte-level tokens as Llama 3's, or of pieces with bytes for what they
    lack, as Llama 2's. Which token begins, ends and pads is in tokenizer_config.json or
    special_tokens_map.json beside it. A text that spells a special token stays text. What pieces
    put before a text's first word, a space, is decoded with it. Raises UserError where a file is
    damaged, of another kind, or names no token that ends a text."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
            content = json.loads(text)
            self._library = tokenizers.Tokenizer.from_str(text)
        # The library raises bare exceptions.
        except Exception as error:
            raise UserError(f"{file} is not a tokenizer.json ({error}); is it whole?") from error
        self._library.encode_special_tokens = True
        self._library.no_padding()
        self._library.no_truncation()
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values())
        by_id = {number: token for token, number in ids.items()}
        added = {each["id"]: each for each in content.get("added_tokens", [])}
        self._special = frozenset(number for number, each in added.items() if each.get("special"))
        decoder = json.dumps(content.get("decoder"))
        if not any(f'"{kind}"' in decoder for kind in _DECODERS):
            raise UserError(
                f"{file} is not of a kind that is read here: its decoder is none of "
                f"{', '.join(_DECODERS)}, which tokenizers of Llamas and BERT have"
            )
        bytewise = '"ByteLevel"' in decoder
        self._bytes = []
        for number in range(self.vocab_size):
            token = by_id.get(number, "")
            plain = number in added or not bytewise
            if '"WordPiece"' in decoder:
                token = token[2:] if token.startswith("##") else f" {token}"
            self._bytes.append(_piece_bytes(token) if plain else _token_bytes(token))
        named = _named_tokens(file.parent)
        self.eos_token_id = self.eod_token_id = _id_of(file, named, "eos_token", ids)
        self.bos_token_id = _id_of(file, named, "bos_token", ids, self.eos_token_id)
        self.pad_token_id = _id_of(file, named, "pad_token", ids, self.eos_token_id)
        self.mask_token_id = ids.get("[MASK]")
        # The template of some files leaves out the first token that transformers adds.
        self._begins = bool(named.get("add_bos_token")) and not self._library.encode("").ids

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The library does not pickle it.
        self._library.encode_special_tokens = True


def train_word_pieces(texts: Iterable[str], size: int, path: Path) -> None:
    """Write the tokenizer.json of a vocabulary of at most `size` lower-case word pieces, with
    BERT's special tokens."""
    library = tokenizers.BertWordPieceTokenizer(lowercase=True)
    library.train_from_iterator(texts, vocab_size=size, show_progress=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    library.save(str(path))


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer.model, as Llama 2's (Kudo and Richardson 2018, "SentencePiece"). Raises UserError
    where it is damaged or has no piece that ends a text."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import sentencepiece

        self._library = sentencepiece.SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(Path(path).read_bytes())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        except RuntimeError as error:
            raise UserError(f"{path} is not a model of sentencepiece; is it whole?") from error
        library = self._library
        self.vocab_size = library.GetPieceSize()
        self.eos_token_id = self.eod_token_id = library.eos_id()
        if self.eos_token_id < 0:
            raise UserError(f"{path} has no piece that ends a text (eos)")
        self._begins = library.bos_id() >= 0
        self.bos_token_id = library.bos_id() if self._begins else self.eos_token_id
        self.pad_token_id = library.pad_id() if library.pad_id() >= 0 else self.eos_token_id
        self._special = frozenset(filter(library.IsControl, range(self.vocab_size)))
        self._bytes = [_piece_bytes(library.IdToPiece(each)) for each in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        first = [self.bos_token_id] if self._begins else []
        return [*first, *self._library.EncodeAsIds(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for position, text in enumerate(texts):
            _check_text(text, f"text {position}: ")
        return self._library.Encode(list(texts), out_type=int, num_threads=1)


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer at `path`: a file, or a folder with tokenizer.json, tokenizer.model, or
    vocab.json and merges.txt, of which the first counts. Raises UserError where there is none."""
    place = Path(path)
    if not os.fspath(path) or not place.exists():
        raise UserError(
            f"there is no tokenizer at {os.fspath(path)!r}: give --tokenizer a tokenizer.json, a "
            "tokenizer.model or the folder that one is in"
        )
    if place.is_file():
        return (HuggingFaceTokenizer if place.suffix == ".json" else SentencePieceTokenizer)(place)
    if (place / "tokenizer.json").is_file():
        return HuggingFaceTokenizer(place / "tokenizer.json")
    if (place / "tokenizer.model").is_file():
        return SentencePieceTokenizer(place / "tokenizer.model")
    if (place / "vocab.json").is_file():
        return GPT2Tokenizer(place / "vocab.json", place / "merges.txt")
    raise UserError(f"{place} has no tokenizer.json, no tokenizer.model and no vocab.json")


class StreamDecoder:
    """Text of ids that come one by one, in whole UTF-8 characters: a character may take several
    tokens, whose bytes are held back. All pieces together are what `Tokenizer.decode` gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
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


def _piece_bytes(piece: str) -> bytes:
    """Of a piece in which U+2581 stands for a space and <0x41> for a byte."""
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("\u2581", " ").encode("utf-8")


def _named_tokens(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer.json call its special tokens."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / name} is not JSON ({error}); is it whole?") from error
        found.update({key: value for key, value in content.items() if value is not None})
    # A token may be an object with its text.
    return {key: v.get("content") if isinstance(v, dict) else v for key, v in found.items()}


def _id_of(
    file: Path, named: dict[str, Any], role: str, ids: dict[str, int], otherwise: int | None = None
) -> int:
    """The id of the token with a role; usual names count where no file says it."""
    usual = {"eos_token": ("</s>", "<|end_of_text|>", END_OF_TEXT, "<|eot_id|>", "[SEP]")}
    usual |= {"bos_token": ("<s>", "<|begin_of_text|>", "[CLS]"), "pad_token": ("[PAD]",)}
    candidates = [named[role]] if role in named else usual.get(role, ())
    for token in candidates:
        if token in ids:
            return ids[token]
    if role in named:
        raise UserError(f"{file} has no {named[role]!r}, which a file beside it calls {role}")
    if otherwise is None:
        raise UserError(
            f"{file} does not say which token ends a text: put "
            '{"eos_token": "..."} into tokenizer_config.json beside it'
        )
    return otherwise


def _check_text(text: str, where: str = "") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}character {error.start} is half a surrogate pair (\\u"
            f"{ord(text[error.start]):04x}), which is not a character; the text was decoded wrongly"
        ) from error
