"""Our GPT-2 tokenizer against reference ids, and what LiBai asks of a tokenizer."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from libai.config import LazyCall, instantiate
from libai.engine import DefaultTrainer
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


def test_padded_vocab_size(gpt2: GPT2Tokenizer) -> None:
    sizes = [gpt2.padded_vocab_size(multiple) for multiple in (1, 256, 50257)]
    assert sizes == [50257, 50432, 50257]


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
