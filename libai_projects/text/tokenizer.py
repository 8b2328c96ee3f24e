"""GPT-2's byte-level BPE: text to token ids and back, by the Hugging Face `tokenizers` library.

Nothing is added or taken away: leading spaces stay (libai 0.1.1's own tokenizer strips them), no
prefix space, no clean-up when decoding. "<|endoftext|>" in a user's prompt is text and not the
special token, unless the caller says otherwise.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

# The library's own threads do not survive a fork (data loader workers), so it must not start any;
# whoever wants several cores uses processes. It reads the variable at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers import models, pre_tokenizers

from libai_projects.text.vocabulary import END_OF_TEXT, byte_alphabet, load_vocabulary


class GPT2Tokenizer:
    """GPT-2's tokenizer, also as `cfg.tokenization.tokenizer` of a LiBai config.

    It is immutable, can be pickled, and used in forked processes and by several threads. LiBai's
    configs pass `do_lower_case`, which is ignored, as in LiBai: the vocabulary is cased. Raises
    UserError as `vocabulary.load_vocabulary`.
    """

    # The names that libai 0.1.1 asks its tokenizers for. GPT-2 has one special token; eod ("end of
    # document") is LiBai's word for what separates the texts of a dataset.
    bos_token = eos_token = eod_token = unk_token = pad_token = END_OF_TEXT

    def __init__(
        self,
        vocab_file: str | os.PathLike[str],
        merges_file: str | os.PathLike[str],
        do_lower_case: bool = False,
    ) -> None:
        vocabulary = load_vocabulary(Path(vocab_file), Path(merges_file))
        bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._bpe = bpe
        self._ids = vocabulary.ids
        self._tokens = sorted(vocabulary.ids, key=vocabulary.ids.__getitem__)
        self._bytes = [_token_bytes(token) for token in self._tokens]
        self.eos_token_id = vocabulary.ids[END_OF_TEXT]

    def __deepcopy__(self, memo: object) -> GPT2Tokenizer:
        # omegaconf copies what a config holds, and nothing here ever changes.
        return self

    @property
    def eod_token_id(self) -> int:
        """Id of the token that separates texts in a dataset."""
        return self.eos_token_id

    @property
    def bos_token_id(self) -> int:
        """Id of the token that generation starts from where there is no prompt."""
        return self.eos_token_id

    @property
    def pad_token_id(self) -> int:
        """Id to fill batches with. GPT-2 has none of its own, so mask these positions."""
        return self.eos_token_id

    @property
    def unk_token_id(self) -> int:
        """Never produced: every byte has a token."""
        return self.eos_token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the special one included: 50257 for GPT-2."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def padded_vocab_size(self, multiple: int = 1) -> int:
        """The vocabulary size rounded up to a multiple, which splits evenly over processes."""
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1, not {multiple}")
        return -(-self.vocab_size // multiple) * multiple

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of a text, not stripped; ValueError for half a surrogate pair, not in UTF-8.

        Leave `parse_special`, which takes "<|endoftext|>" for the special token, off for text from
        outside, which could else end a prompt early.
        """
        if parse_special and END_OF_TEXT in text:
            ids: list[int] = []
            for number, piece in enumerate(text.split(END_OF_TEXT)):
                ids += [self.eos_token_id] if number else []
                ids += self.encode(piece)
            return ids
        _check_text(text)
        return self._bpe.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, without special tokens; a ValueError names the text's position."""
        try:
            encodings = self._bpe.encode_batch_fast(list(texts))
        except TypeError:
            for position, text in enumerate(texts):
                _check_text(text, f"text {position}: ")
            raise
        return [encoding.ids for encoding in encodings]

    @overload
    def __call__(self, text: str) -> list[int]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, text: Sequence[str]) -> list[list[int]]: ...

    def __call__(self, text: str | Sequence[str]) -> list[int] | list[list[int]]:
        """`encode` of one text, `encode_batch` of several."""
        return self.encode(text) if isinstance(text, str) else self.encode_batch(text)

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

    def stream_decoder(self, skip_special: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special)

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, in the vocabulary's own spelling."""
        return [self._tokens[i] for i in self.encode(text)]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...  # type: ignore[overload-overlap]

    @overload
    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Ids of tokens in the vocabulary's own spelling; KeyError for others."""
        return self._ids[tokens] if isinstance(tokens, str) else [self._ids[t] for t in tokens]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Tokens in the vocabulary's own spelling; IndexError for ids outside the vocabulary."""
        return [self._tokens[i] for i in ids] if isinstance(ids, Sequence) else self._tokens[ids]

    def get_vocab(self) -> dict[str, int]:
        """A copy of the vocabulary, token -> id."""
        return dict(self._ids)


class StreamDecoder:
    """Text of ids that come one by one, in whole UTF-8 characters: a character may take several
    tokens, whose bytes are held back. All pieces together are what `GPT2Tokenizer.decode` gives."""

    def __init__(self, tokenizer: GPT2Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes, often "" for emoji and many scripts."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special))

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
