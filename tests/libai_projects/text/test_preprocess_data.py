"""tools/preprocess_data.py makes what LiBai's tool of this name makes, and mends its faults."""

from __future__ import annotations

import json
from pathlib import Path

import oneflow as flow
import pytest
import sentencepiece
from libai.data.data_utils import indexed_dataset as libai
from libai.tokenizer import BertTokenizer, T5Tokenizer
from libai.tokenizer import GPT2Tokenizer as LibaiTokenizer

from libai_projects.text.indexed_dataset import MMapTokenDataset
from libai_projects.text.preprocess import main
from libai_projects.text.tokenizer import GPT2Tokenizer
from tests.launch import REPOSITORY, run_process
from tests.libai_projects.text.conftest import PROMPTS, VocabularyFiles

SCRIPT = REPOSITORY / "libai_projects" / "tools" / "preprocess_data.py"
# Without white space at the ends: libai's GPT-2 tokenizer strips it.
TEXTS = [prompt.strip() for prompt in PROMPTS] + ["", "two\nlines"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """JSON lines with two keys, the second of which is sometimes empty."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(TEXTS):
            title = f"title {number}" if number % 2 else ""
            file.write(json.dumps({"text": text, "title": title}) + "\n")
    return path


def write_as_libai_does(prefix: Path, vocab_size: int, texts: list[list[int]]) -> None:
    builder = libai.make_builder(f"{prefix}.bin", "mmap", vocab_size)
    for ids in filter(None, texts):
        builder.add_item(flow.tensor(ids, dtype=flow.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_same_bytes_as_libai(corpus: Path, small_files: VocabularyFiles, tmp_path: Path) -> None:
    options = ["--input", str(corpus), "--json-keys", "text", "title", "--dataset-impl", "mmap"]
    options += ["--tokenizer-name", "GPT2Tokenizer", *small_files.options, "--workers", "2"]
    assert main([*options, "--output-prefix", str(tmp_path / "ours")]) == 0
    tokenizer = LibaiTokenizer(small_files.vocab, small_files.merges)
    lines = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    for key in ("text", "title"):
        theirs = tmp_path / f"theirs_{key}"
        encoded = [tokenizer.encode(line[key]) if line[key] else [] for line in lines]
        write_as_libai_does(theirs, len(tokenizer), encoded)
        assert contents(tmp_path / f"ours_{key}_document") == contents(theirs)
    # As LiBai's tool, it replaces what is there.
    assert main([*options, "--output-prefix", str(tmp_path / "ours")]) == 0
    assert contents(tmp_path / "ours_title_document") == contents(theirs)
    assert not list(tmp_path.glob("*.part"))


def test_the_command_of_the_readme(
    corpus: Path, small: GPT2Tokenizer, small_files: VocabularyFiles, tmp_path: Path
) -> None:
    prefix = tmp_path / "out" / "data"
    options = ["--input", corpus, "--tokenizer-name", "GPT2Tokenizer", *small_files.options]
    options += ["--output-prefix", prefix, "--append-eod", "--log-interval", "3"]
    options += ["--do-lower-case", "--extra-ids", "0"]
    done = run_process([SCRIPT, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    dataset = MMapTokenDataset(f"{prefix}_text_document", small.vocab_size)
    texts = list(filter(None, TEXTS))
    assert [ids.tolist() for ids in dataset] == [
        [*small.encode(t), small.eod_token_id] for t in texts
    ]
    assert "8 lines: 1 empty, 0 bad" in done.stdout
    assert "7 documents, " in done.stdout


@pytest.fixture
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence model in nltk's own format that knows one abbreviation."""
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).touch()
    (folder / "abbrev_types.txt").write_text("dr\n")
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk_data")])


@pytest.mark.usefixtures("punkt")
@pytest.mark.parametrize("keep", [False, True])
def test_sentences(
    keep: bool, small: GPT2Tokenizer, small_files: VocabularyFiles, tmp_path: Path
) -> None:
    text = "Dr. Pig is cute. He paints.\n\nOn canvas!  "
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "One."}) + "\n")
    options = ["--input", str(corpus), "--tokenizer-name", "GPT2Tokenizer", *small_files.options]
    options += ["--output-prefix", str(tmp_path / "data"), "--split-sentences", "--append-eod"]
    assert main(options + ["--keep-newlines"] * keep) == 0
    dataset = MMapTokenDataset(tmp_path / "data_text_sentence", small.vocab_size)
    sentences = [small.decode(ids, skip_special=False) for ids in dataset]
    if keep:
        expected = ["Dr. Pig is cute. ", "He paints.\n\n", "On canvas!  <|endoftext|>"]
        assert "".join(expected).startswith(text)
    else:
        expected = ["Dr. Pig is cute.", "He paints.", "On canvas!<|endoftext|>"]
    assert sentences == [*expected, "One.<|endoftext|>"]
    assert dataset.doc_idx.tolist() == [0, 3, 4]


def test_bert_goes_through_libai(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab, corpus = tmp_path / "vocab.txt", tmp_path / "corpus.jsonl"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cute", "pig", "##gy", "猫", "."]
    vocab.write_text("\n".join(words) + "\n", encoding="utf-8")
    texts = ["A cute piggy.", "猫 a"]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--input", str(corpus), "--tokenizer-name", "BertTokenizer"]
    options += ["--vocab-file", str(vocab), "--output-prefix", str(tmp_path / "data")]
    assert main([*options, "--do-lower-case", "--append-eod", "--workers", "2"]) == 0
    reference = BertTokenizer(str(vocab), do_lower_case=True)
    dataset = MMapTokenDataset(tmp_path / "data_text_document", len(words))
    # libai's end token of BERT is its padding, id 0.
    assert [ids.tolist() for ids in dataset] == [[*reference.encode(text), 0] for text in texts]
    assert "did you forget --split-sentences?" in capsys.readouterr().out


def test_t5_gets_its_extra_ids(tmp_path: Path) -> None:
    sentences, corpus = tmp_path / "sentences.txt", tmp_path / "corpus.jsonl"
    sentences.write_text("\n".join(PROMPTS * 4), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(sentences), model_prefix=str(tmp_path / "t5"), vocab_size=60, minloglevel=2
    )
    corpus.write_text(json.dumps({"text": "a cute pig <extra_id_0>"}) + "\n")
    options = ["--input", str(corpus), "--tokenizer-name", "T5Tokenizer", "--append-eod"]
    options += ["--vocab-file", str(tmp_path / "t5.model"), "--extra-ids", "7"]
    assert main([*options, "--output-prefix", str(tmp_path / "data")]) == 0
    reference = T5Tokenizer(str(tmp_path / "t5.model"), extra_ids=7)
    ids = MMapTokenDataset(tmp_path / "data_text_document", 67)[0].tolist()
    assert ids == [*reference.encode("a cute pig <extra_id_0>"), reference.eos_token_id]
    assert 66 in ids


def test_what_the_user_can_mend(
    corpus: Path,
    small_files: VocabularyFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"body": "x"}\n')
    gpt2 = ["--tokenizer-name", "GPT2Tokenizer", *small_files.options]
    bert = ["--tokenizer-name", "BertTokenizer"]
    t5 = ["--tokenizer-name", "T5Tokenizer", "--vocab-file", small_files.vocab]
    for options, message in [
        ([corpus, *gpt2[:4]], "--tokenizer-name GPT2Tokenizer needs --merges-file FILE"),
        ([corpus, *bert], "--tokenizer-name BertTokenizer needs --vocab-file FILE"),
        ([corpus, *bert, "--vocab-file", "none.txt"], "--vocab-file none.txt does not exist"),
        ([corpus, *t5], "is none for T5Tokenizer"),
        ([corpus, *gpt2, "--split-sentences"], "`python -m nltk.downloader punkt_tab`"),
        ([corpus, *gpt2, "--keep-newlines"], "give both"),
        ([corpus, *gpt2, "--json-keys", "body"], "corpus.jsonl:1: has no key 'body'; it has"),
        ([bad, *gpt2], f"{bad}:2: has no key 'text'; it has 'body'. Mend the line"),
        ([tmp_path / "none.jsonl", *gpt2], "none.jsonl does not exist"),
    ]:
        arguments = ["--output-prefix", str(tmp_path / "data"), "--input", *map(str, options)]
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("data*"))
    arguments = ["--output-prefix", str(tmp_path / "data"), "--input", str(bad), *gpt2]
    assert main([*arguments, "--bad-lines", "skip"]) == 0
    assert "2 lines: 0 empty, 1 bad" in capsys.readouterr().out
