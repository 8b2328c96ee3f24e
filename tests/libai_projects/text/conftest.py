"""Vocabularies: GPT-2's own where the shared data is, and a small one made on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

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
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.json as Llama 3's: byte-level, a token that begins, no settings."""
    folder = tmp_path_factory.mktemp("byte_level")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(PROMPTS * 5, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.json as Llama 2's: pieces, and bytes for what they lack."""
    folder = tmp_path_factory.mktemp("pieces")
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    mark = normalizers.Replace(" ", "\u2581")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), mark])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    control = ["<unk>", "<s>", "</s>"]
    tokens = control + [f"<0x{byte:02X}>" for byte in range(256)]
    # 'ü' and what else is not in the text takes bytes.
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=tokens, show_progress=False)
    library.train_from_iterator(["a cute pig, highly detailed, oil on canvas"] * 5, trainer)
    content = json.loads(library.to_str())
    # Bytes are pieces like others.
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < 3]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def sentencepiece_model(folder: Path, text: list[str] = PROMPTS, **options: object) -> Path:
    """A tokenizer.model as Llama 2's: pieces of BPE, bytes for what they lack, text as it is."""
    (folder / "text.txt").write_text("\n".join(text * 5), encoding="utf-8")
    settings: dict[str, object] = {"vocab_size": 330, "model_type": "bpe", "byte_fallback": True}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **{**settings, **options},
    )
    (folder / "text.txt").unlink()
    (folder / "tokenizer.vocab").unlink()
    return folder / "tokenizer.model"


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_model(tmp_path_factory.mktemp("sentencepiece"), pad_id=3)


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
