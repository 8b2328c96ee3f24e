"""Our GPT-2 tokenizer against reference ids, libai's own, and what LiBai asks of a tokenizer."""

from __future__ import annotations

import copy
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from libai.config import LazyCall, instantiate
from libai.engine import DefaultTrainer
from libai.tokenizer import GPT2Tokenizer as LibaiTokenizer
from omegaconf import OmegaConf

from libai_projects.text.tokenizer import GPT2Tokenizer
from tests.libai_projects.text.conftest import PROMPTS, VocabularyFiles

References = list[tuple[str, list[int]]]


class Dataset:
    def __init__(self, tokenizer: GPT2Tokenizer) -> None:
        self.tokenizer = tokenizer


def test_encodes_as_the_references_do(gpt2: GPT2Tokenizer, reference_encodings: References) -> None:
    assert len(reference_encodings) == 237
    texts = [text for text, _ in reference_encodings]
    assert [gpt2.encode(text) for text in texts] == [ids for _, ids in reference_encodings]
    assert gpt2.encode_batch(texts) == [ids for _, ids in reference_encodings]


def test_decoding_gives_the_text_back(gpt2: GPT2Tokenizer, reference_encodings: References) -> None:
    for text, ids in reference_encodings:
        assert gpt2.decode(ids) == text


def test_stream_pieces_are_whole_characters(
    gpt2: GPT2Tokenizer, reference_encodings: References
) -> None:
    for text, ids in reference_encodings:
        stream = gpt2.stream_decoder()
        pieces = [stream.feed(i) for i in ids]
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)
        assert stream.finish() == ""
    ids = gpt2.encode("🐷")
    stream = gpt2.stream_decoder()
    assert len(ids) > 1
    assert [stream.feed(i) for i in ids] == [""] * (len(ids) - 1) + ["🐷"]


def test_stream_of_any_ids_is_what_decode_gives(small: GPT2Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(small.vocab_size) for _ in range(30)]
        stream = small.stream_decoder()
        streamed = "".join(stream.feed(i) for i in ids) + stream.finish()
        assert streamed == small.decode(ids)
        # Python's own decoder on the bytes is the reference for broken UTF-8.
        expected = b"".join(small.token_bytes(i) for i in ids).decode("utf-8", "replace")
        assert small.decode(ids) == expected


def test_end_of_text_is_text(gpt2: GPT2Tokenizer) -> None:
    assert gpt2.eos_token_id == 50256
    assert 50256 not in gpt2.encode("a<|endoftext|> b")
    assert gpt2.decode([64, 50256, 275]) == "a b"
    assert gpt2.decode([64, 50256, 275], skip_special=False) == "a<|endoftext|> b"


def test_same_ids_as_libai(
    gpt2: GPT2Tokenizer, gpt2_files: VocabularyFiles, sd_prompts: Path
) -> None:
    libai = LibaiTokenizer(gpt2_files.vocab, gpt2_files.merges)
    for text in sd_prompts.read_text(encoding="utf-8").split("\n")[:60]:
        assert gpt2.encode(text) == libai.encode(text)
    # libai 0.1.1 as published strips this; a prompt to be continued begins as written.
    assert gpt2.encode(" a dog") == [257, 3290]


def test_libai_builds_it_from_a_config(small_files: VocabularyFiles) -> None:
    config = OmegaConf.create(
        {
            "tokenization": {"append_eod": True, "make_vocab_size_divisible_by": 256},
            "model": {"cfg": {"vocab_size": 1}},
            "train": {"dist": {"tensor_parallel_size": 1}},
        },
        flags={"allow_objects": True},
    )
    config.tokenization.tokenizer = LazyCall(GPT2Tokenizer)(
        vocab_file=small_files.vocab, merges_file=small_files.merges, do_lower_case=True
    )
    tokenizer = DefaultTrainer.build_tokenizer(config)
    assert isinstance(tokenizer, GPT2Tokenizer)
    assert config.model.cfg.vocab_size == 512
    assert (tokenizer.vocab_size, len(tokenizer)) == (300, 300)
    assert tokenizer.eod_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id
    # The trainer puts it into the dataset's config, and the data loader's workers get a copy.
    node = LazyCall(Dataset)(tokenizer=None)
    node.tokenizer = tokenizer
    assert instantiate(node).tokenizer.encode(PROMPTS[0]) == tokenizer.encode(PROMPTS[0])


@pytest.mark.parametrize(
    ("multiple", "size"), [(1, 50257), (128, 50304), (256, 50432), (50257, 50257)]
)
def test_padded_vocab_size(gpt2: GPT2Tokenizer, multiple: int, size: int) -> None:
    assert gpt2.padded_vocab_size(multiple) == size


def test_copies_encode_alike(small: GPT2Tokenizer) -> None:
    expected = small.encode_batch(PROMPTS)
    assert pickle.loads(pickle.dumps(small)).encode_batch(PROMPTS) == expected
    assert copy.deepcopy(small).encode_batch(PROMPTS) == expected
    assert pickle.loads(pickle.dumps(small)).decode(expected[3]) == PROMPTS[3]


def test_works_in_forked_processes_and_threads(
    small: GPT2Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = small.encode_batch(PROMPTS * 20)
    with ThreadPoolExecutor(4) as pool:
        assert all(ids == expected for ids in pool.map(small.encode_batch, [PROMPTS * 20] * 8))
    child = os.fork()
    if child == 0:
        os._exit(0 if small.encode_batch(PROMPTS * 20) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # The library warns there if it had started threads before the fork.
    assert "fork" not in capfd.readouterr().err


def test_what_is_not_text_or_no_id_is_an_error(small: GPT2Tokenizer) -> None:
    with pytest.raises(ValueError, match="character 1 is half a surrogate pair"):
        small.encode("a\ud800b")
    with pytest.raises(ValueError, match="text 1: character 0 is half a surrogate pair"):
        small.encode_batch(["fine", "\udcff"])
    with pytest.raises(ValueError, match=r"token id 300 is outside the vocabulary, 0 \.\. 299"):
        small.decode([300])
    with pytest.raises(ValueError, match="token id -1 is outside"):
        small.stream_decoder().feed(-1)
