"""Word pieces, the datasets of prepare.py, and the samples that are made of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

from oneflow_accel.errors import DataError, UserError

import numpy as np
import pytest
import tokenizers

from libai_projects.text import prepare
from libai_projects.text.masked import MaskedText
from libai_projects.text.tokenizer import HuggingFaceTokenizer, open_tokenizer

PAD, UNK, CLS, SEP, MASK = range(5)
LENGTH = 32


def sentence(draw: np.random.Generator, words: int) -> str:
    return " ".join(f"word{draw.integers(0, 90):02d}" for _ in range(words)) + "."


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one to six sentences of one to nine words, and their vocabulary."""
    folder, draw = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    lines = [
        " ".join(sentence(draw, draw.integers(1, 10)) for _ in range(draw.integers(1, 7)))
        for _ in range(400)
    ]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    options = ["--tokenizer", folder / "tokenizer.json", "--train-vocabulary", 200]
    options += ["--output-prefix", folder / "data", "--split-sentences", "--no-append-eod"]
    argv = [folder / "text.txt", *options, "--workers", 1]
    assert prepare.main([str(each) for each in argv]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def pieces(prefix: Path) -> HuggingFaceTokenizer:
    return open_tokenizer(prefix.parent / "tokenizer.json")


Make = Callable[..., MaskedText]


@pytest.fixture
def make(prefix: Path, pieces: HuggingFaceTokenizer) -> Make:
    return lambda **options: MaskedText(str(prefix), LENGTH, pieces, **options)


@pytest.fixture(scope="module")
def documents(prefix: Path) -> list[tuple[int, ...]]:
    """What the library makes of each line."""
    library = tokenizers.Tokenizer.from_file(str(prefix.parent / "tokenizer.json"))
    lines = (prefix.parent / "text.txt").read_text().splitlines()
    return [tuple(library.encode(line, add_special_tokens=False).ids) for line in lines]


def restored(sample: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens before they were masked."""
    return np.where(sample["labels"] >= 0, sample["labels"], sample["input_ids"])


def test_word_pieces_are_the_librarys(pieces: HuggingFaceTokenizer, prefix: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(prefix.parent / "tokenizer.json"))
    text = "Word07 word99. unseen\u00e9 \U0001f600"
    assert pieces.encode_batch([text]) == [library.encode(text, add_special_tokens=False).ids]
    assert pickle.loads(pickle.dumps(pieces)).encode(text) == pieces.encode(text)
    assert pieces.decode(pieces.encode("word07 word11"))[1:] == "word07 word11"
    special = pieces.pad_token_id, pieces.bos_token_id, pieces.eos_token_id, pieces.mask_token_id
    assert special == (PAD, CLS, SEP, MASK)


def test_samples_without_pairs_are_the_text(make: Make, documents: list[tuple[int, ...]]) -> None:
    dataset, found, cut = make(masked_lm_only=True, copies=1), [], 0
    for index in range(len(dataset)):
        sample = dataset.arrays(index)
        assert sample.keys() == {"input_ids", "labels", "attention_mask", "tokentype_ids"}
        end = int(sample["attention_mask"].sum())
        tokens = restored(sample)
        assert (tokens[0], tokens[end - 1]) == (CLS, SEP)
        assert (tokens[end:] == PAD).all()
        assert not sample["tokentype_ids"].any()
        found.append(tokens[1 : end - 1])
        cut += end == LENGTH
    short = {each for each in documents if len(each) < LENGTH - 2}
    assert min(len(short), cut) > 10
    assert short <= set(map(tuple, found))


def test_the_shares_of_masked_random_and_kept_tokens(make: Make) -> None:
    dataset = make(masked_lm_only=True)
    kinds, chosen = np.zeros(2), 0
    for index in range(len(dataset)):
        sample = dataset.arrays(index)
        places = sample["labels"] >= 0
        # Less [CLS] and [SEP].
        inner = int(sample["attention_mask"].sum()) - 2
        assert places.sum() == max(1, round(0.15 * inner))
        shown, told = sample["input_ids"][places], sample["labels"][places]
        assert not set(told) & {PAD, CLS, SEP, MASK}
        kinds += [(shown == MASK).sum(), ((shown != MASK) & (shown != told)).sum()]
        chosen += len(told)
    # Of n draws a share p is off by sqrt(p (1 - p) / n); four of that. A random token of more
    # than 100 is hardly ever the same one.
    assert abs(kinds[0] / chosen - 0.8) < 4 * np.sqrt(0.16 / chosen)
    assert abs(kinds[1] / chosen - 0.1) < 4 * np.sqrt(0.09 / chosen) + 0.001


def test_pairs_are_exchanged_in_half_of_the_samples(
    make: Make, documents: list[tuple[int, ...]]
) -> None:
    dataset, exchanged = make(copies=4), []
    joined = " | ".join(" ".join(map(str, document)) for document in documents)
    for index in range(len(dataset)):
        sample = dataset.arrays(index)
        tokens, end = restored(sample), int(sample["attention_mask"].sum())
        (middle, last) = np.flatnonzero(tokens == SEP)
        assert 1 < middle < last - 1 == end - 2
        np.testing.assert_array_equal(
            np.flatnonzero(sample["tokentype_ids"]), np.arange(middle + 1, end)
        )
        a, b = tokens[1:middle], tokens[middle + 1 : last]
        exchanged.append(int(sample["ns_labels"]))
        if end < LENGTH:
            # Nothing is cut, so that one order of the two is the text's.
            first, second = (b, a) if exchanged[-1] else (a, b)
            assert " ".join(map(str, [*first, *second])) in joined
    assert abs(np.mean(exchanged) - 0.5) < 4 * np.sqrt(0.25 / len(exchanged))


def test_a_sample_follows_from_its_number_and_the_seed(make: Make) -> None:
    dataset, other = make(copies=3), make(copies=3, seed=5)
    once = len(dataset) // 3
    assert len(dataset) == 3 * once
    first, again = dataset.arrays(2), make(copies=3).arrays(2)
    for name, array in first.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    for different in (other.arrays(2), dataset.arrays(2 + once)):
        assert (different["labels"] != first["labels"]).any()


def test_what_cannot_be_sampled(
    prefix: Path, pieces: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="needs a tokenizer with"):
        MaskedText(str(prefix), LENGTH, None)
    text, place = prefix.parent / "text.txt", prefix.parent / "tokenizer.json"

    def prepared(*options: object) -> str:
        argv = [text, "--output-prefix", tmp_path / "data", "--workers", 1, *options]
        code = prepare.main([str(each) for each in argv])
        return "" if code == 0 else capsys.readouterr().err

    assert prepared("--tokenizer", place) == ""
    # Each line is one sentence then.
    with pytest.raises(DataError, match="no document of two sentences"):
        MaskedText(str(tmp_path / "data"), LENGTH, pieces)
    train = ("--train-vocabulary", 200)
    assert "writes what --tokenizer names" in prepared(*train)
    assert "--overwrite replaces it" in prepared(*train, "--tokenizer", place)
    new = ("--tokenizer", tmp_path / "new.json", "--format", "jsonl")
    assert "reads plain text" in prepared(*train, *new)
