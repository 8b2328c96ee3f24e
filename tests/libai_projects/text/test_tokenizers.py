"""A tokenizer.json and a tokenizer.model beside the libraries that made them."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

from oneflow_accel.errors import UserError

import pytest
import sentencepiece
import tokenizers

from libai_projects.text.tokenizer import (
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    open_tokenizer,
)
from tests.libai_projects.text.conftest import PROMPTS, VocabularyFiles, sentencepiece_model

TEXTS = [*PROMPTS, "", " ", "  two spaces", "東京 🗼", "a new\nline", "\x00 and \x07"]


@pytest.fixture(params=["byte_level", "pieces", "model_file", "small"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the four kinds."""
    found = request.getfixturevalue(request.param)
    return open_tokenizer(found) if isinstance(found, Path) else found


def with_settings(folder: Path, target: Path, **settings: object) -> Path:
    """A copy of a tokenizer.json with a tokenizer_config.json beside it."""
    shutil.copytree(folder, target)
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return target


def test_byte_level_ids_and_text_are_the_librarys(byte_level: Path) -> None:
    ours = open_tokenizer(byte_level)
    library = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    assert isinstance(ours, HuggingFaceTokenizer)
    assert ours.vocab_size == len(ours) == library.get_vocab_size() == 300
    assert ours.padded_vocab_size(8) == 304
    for text in TEXTS:
        ids = ours.encode(text)
        # The template puts it before each text.
        assert ids == library.encode(text).ids
        assert ids[0] == ours.bos_token_id == 0
        assert ours.decode(ids) == library.decode(ids) == text
        assert ours.decode(ids, skip_special=False) == "<|begin_of_text|>" + text
    # A dataset's texts have no such token.
    plain = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert ours.encode_batch(TEXTS) == plain


def test_pieces_ids_and_text_are_the_librarys(pieces: Path) -> None:
    ours = open_tokenizer(pieces)
    library = tokenizers.Tokenizer.from_file(str(pieces / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == ours.encode_batch([text])[0] == library.encode(text).ids
        # The library takes away the space that it puts before a text; a continuation needs it.
        assert library.decode(ids) == text
        assert ours.decode(ids) == (f" {text}" if text else "")


def test_sentencepiece_ids_and_text_are_the_librarys(model_file: Path) -> None:
    ours = open_tokenizer(model_file)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert isinstance(ours, SentencePieceTokenizer)
    assert ours.vocab_size == library.get_piece_size() == 330
    special = (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id)
    assert special == (library.bos_id(), library.eos_id(), library.pad_id()) == (1, 2, 3)
    assert ours.eod_token_id == 2
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [1, *library.encode(text)]
        assert library.decode(ids) == text
        assert ours.decode(ids) == (f" {text}" if text else "")
    assert ours.encode_batch(TEXTS) == library.encode(TEXTS)
    assert ours.decode([1, 2, 3]) == ""
    assert ours.decode([1, 2, 3], skip_special=False) == "<s></s><pad>"


def test_a_text_that_spells_a_special_token_is_text(any_tokenizer: Tokenizer) -> None:
    special = {any_tokenizer.bos_token_id, any_tokenizer.eos_token_id, any_tokenizer.pad_token_id}
    for token in ("<s>", "</s>", "<|begin_of_text|>", "<|end_of_text|>", "<pad>", "<|pad|>"):
        ids = any_tokenizer.encode_batch([f"a {token} b"])[0]
        assert not special & set(ids)
        assert any_tokenizer.decode(ids).strip() == f"a {token} b"


def test_copies_encode_alike(any_tokenizer: Tokenizer) -> None:
    texts = [*PROMPTS, "a </s> b", "a <|end_of_text|> b"]
    other = pickle.loads(pickle.dumps(any_tokenizer))
    assert other.encode_batch(texts) == any_tokenizer.encode_batch(texts)
    assert [other.encode(text) for text in texts] == [any_tokenizer.encode(text) for text in texts]
    ids = any_tokenizer.encode(PROMPTS[3])
    assert other.decode(ids) == any_tokenizer.decode(ids)
    assert copy.deepcopy(any_tokenizer).encode(PROMPTS[3]) == ids


def test_streamed_pieces_are_whole_characters(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("東京 🗼 by night")
    stream = any_tokenizer.stream_decoder()
    parts = [stream.feed(token) for token in ids]
    assert stream.finish() == ""
    assert "".join(parts) == any_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts)
    # Three bytes each, and no text that has them was trained on.
    assert len(ids) > len("東京 🗼 by night")


def test_what_is_not_text_or_no_id_is_an_error(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="character 1 is half a surrogate pair"):
        any_tokenizer.encode("a\ud800b")
    with pytest.raises(ValueError, match="text 1: character 0 is half a surrogate pair"):
        any_tokenizer.encode_batch(["fine", "\udcff"])
    size = any_tokenizer.vocab_size
    with pytest.raises(ValueError, match=rf"id {size} is outside the vocabulary, 0 .. {size - 1}"):
        any_tokenizer.decode([size])
    with pytest.raises(ValueError, match="id -1 is outside"):
        any_tokenizer.stream_decoder().feed(-1)


def test_special_tokens_of_the_files_beside(byte_level: Path, tmp_path: Path) -> None:
    usual = open_tokenizer(byte_level)
    # <|end_of_text|> ends a text by its name, and pads where nothing says what does.
    assert (usual.bos_token_id, usual.eos_token_id, usual.pad_token_id) == (0, 1, 1)
    folder = with_settings(
        byte_level,
        tmp_path / "named",
        bos_token=None,
        eos_token={"content": "<|begin_of_text|>", "special": True},
        pad_token="<|pad|>",
    )
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|end_of_text|>"}')
    named = open_tokenizer(folder)
    assert (named.bos_token_id, named.eos_token_id, named.pad_token_id) == (1, 0, 2)
    assert named.eod_token_id == 0


def test_a_first_token_that_only_the_settings_add(pieces: Path, tmp_path: Path) -> None:
    begins = open_tokenizer(with_settings(pieces, tmp_path / "begins", add_bos_token=True))
    plain = open_tokenizer(pieces)
    assert begins.encode("a cute pig") == [1, *plain.encode("a cute pig")]
    assert begins.encode_batch(["a cute pig"]) == plain.encode_batch(["a cute pig"])


def test_a_template_does_not_add_its_token_twice(byte_level: Path, tmp_path: Path) -> None:
    folder = with_settings(byte_level, tmp_path / "both", add_bos_token=True)
    assert open_tokenizer(folder).encode("a").count(0) == 1


def test_a_model_with_few_special_pieces(tmp_path: Path) -> None:
    ours = open_tokenizer(sentencepiece_model(tmp_path, bos_id=-1))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert ours.encode(PROMPTS[0]) == library.encode(PROMPTS[0])
    assert ours.bos_token_id == ours.pad_token_id == ours.eos_token_id == library.eos_id()
    with pytest.raises(UserError, match=r"tokenizer\.model has no piece that ends a text \(eos\)"):
        open_tokenizer(sentencepiece_model(tmp_path, eos_id=-1))


def test_folders(
    byte_level: Path, model_file: Path, small_files: VocabularyFiles, tmp_path: Path
) -> None:
    for name, file in (("vocab.json", small_files.vocab), ("merges.txt", small_files.merges)):
        shutil.copy(file, tmp_path / name)
    assert isinstance(open_tokenizer(tmp_path), GPT2Tokenizer)
    shutil.copy(model_file, tmp_path / "tokenizer.model")
    assert isinstance(open_tokenizer(str(tmp_path)), SentencePieceTokenizer)
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    assert isinstance(open_tokenizer(tmp_path), HuggingFaceTokenizer)
    assert isinstance(open_tokenizer(tmp_path / "tokenizer.model"), SentencePieceTokenizer)


def test_files_that_are_none(byte_level: Path, model_file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    whole = (byte_level / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "half.json").write_text(whole[: len(whole) // 2], encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xfc"}')
    (tmp_path / "half.model").write_bytes(model_file.read_bytes()[:1000])
    (tmp_path / "text.model").write_text("a cute pig")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "words.json"))
    for place, message in (
        (tmp_path / "nowhere", "there is no tokenizer at '.*nowhere': give --tokenizer a"),
        ("", "there is no tokenizer at ''"),
        (empty, r"empty has no tokenizer\.json, no tokenizer\.model and no vocab\.json"),
        (tmp_path / "half.json", r"half\.json is not a tokenizer\.json"),
        (tmp_path / "latin.json", r"latin\.json is not a tokenizer\.json \(.utf-8. .* byte 0xfc"),
        (tmp_path / "half.model", r"half\.model is not a model of sentencepiece"),
        (tmp_path / "text.model", r"text\.model is not a model of sentencepiece"),
        (tmp_path / "words.json", r"words\.json is not of a kind that is read here: its decoder"),
    ):
        with pytest.raises(UserError, match=message):
            open_tokenizer(place)


def test_special_tokens_that_are_missing(byte_level: Path, tmp_path: Path) -> None:
    absent = with_settings(byte_level, tmp_path / "absent", eos_token="</s>")
    with pytest.raises(UserError, match="has no '</s>', which a file beside it calls eos_token"):
        open_tokenizer(absent)
    (absent / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        open_tokenizer(absent)
    (absent / "tokenizer_config.json").unlink()
    text = (absent / "tokenizer.json").read_text(encoding="utf-8")
    (absent / "tokenizer.json").write_text(text.replace("<|end_of_text|>", "<|stop|>"))
    with pytest.raises(UserError, match="does not say which token ends a text: put"):
        open_tokenizer(absent)
