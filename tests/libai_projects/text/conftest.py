"""Vocabularies: GPT-2's own where the shared data is, and a small one made on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers

from libai_projects.text.tokenizer import GPT2Tokenizer
from tests.launch import REPOSITORY

SHARED = REPOSITORY.parent / "shared" / "data"
END_OF_TEXT = "<|endoftext|>"

PROMPTS = [
    "a cute pig, highly detailed, artstation",
    " leading and trailing spaces  ",
    'quotes " and \\ backslashes',
    "Ünïcödé, 猫, 🐷👨‍👩‍👧",
    "a cute pig, oil on canvas, by Rembrandt",
    "tab\tinside, it's 3 o'clock",
]


@dataclass(frozen=True)
class VocabularyFiles:
    """Paths of a vocabulary, as text for configs and command lines."""

    vocab: str
    merges: str

    @property
    def options(self) -> list[str]:
        return ["--vocab-file", self.vocab, "--merges-file", self.merges]


@pytest.fixture(scope="session")
def gpt2_files() -> VocabularyFiles:
    folder = SHARED / "gpt2_tokenizer"
    if not folder.is_dir():
        pytest.skip("no shared data")
    return VocabularyFiles(str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture(scope="session")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> VocabularyFiles:
    """A byte-level BPE of 300 tokens, trained by the `tokenizers` library."""
    folder = tmp_path_factory.mktemp("vocabulary")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(PROMPTS * 5, vocab_size=300, special_tokens=[END_OF_TEXT])
    bpe.save_model(str(folder))
    return VocabularyFiles(str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture(scope="session")
def gpt2(gpt2_files: VocabularyFiles) -> GPT2Tokenizer:
    return GPT2Tokenizer(gpt2_files.vocab, gpt2_files.merges)


@pytest.fixture(scope="session")
def small(small_files: VocabularyFiles) -> GPT2Tokenizer:
    return GPT2Tokenizer(small_files.vocab, small_files.merges)


@pytest.fixture(scope="session")
def reference_encodings() -> list[tuple[str, list[int]]]:
    """237 texts and the ids that two independent encoders give them."""
    path = SHARED / "gpt2_tokenizer" / "reference_encodings.jsonl"
    if not path.is_file():
        pytest.skip("no shared data")
    lines = path.read_text(encoding="utf-8").split("\n")
    return [(entry["text"], entry["ids"]) for entry in map(json.loads, filter(None, lines))]


@pytest.fixture(scope="session")
def sd_prompts() -> Path:
    path = SHARED / "sd_prompts" / "diffusiondb.valid.txt"
    if not path.is_file():
        pytest.skip("no shared data")
    return path
