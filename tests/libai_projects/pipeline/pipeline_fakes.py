"""A model and a tokenizer that are quick, and a pipeline made of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

from oneflow_accel import machine

import numpy as np

from libai_projects.inference.text_pipeline import TextPipeline, Words
from libai_projects.models.pages import PagedCache, Step
from libai_projects.models.step_model import StepModel
from libai_projects.text.tokenizer import GPT2Tokenizer, byte_alphabet

# What the model would write, over and over; the ö and the 🐷 take several tokens each.
TEXT = " in a field of möhren, by a 🐷, 4k;"


def write_vocabulary(folder: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt of 256 bytes and the end of text: one token for each byte."""
    by_byte = {byte: character for character, byte in byte_alphabet().items()}
    ids = {by_byte[byte]: byte for byte in range(256)} | {"<|endoftext|>": 256}
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps(ids), encoding="utf-8")
    merges.write_text("#version: 0.2\n", encoding="utf-8")
    return vocab, merges


class CycleModel:
    """A StepModel that likes to write TEXT, `delay` s a step: bytes by position, or by chance."""

    vocab_size = 257
    bytes_per_token = page_bytes = 0
    shares_prefixes = True
    plan = StepModel.plan

    def __init__(self, delay: float = 0.0, max_positions: int = 512) -> None:
        self.delay = delay
        self.max_positions = max_positions
        self.steps = 0
        self.pages: PagedCache | None = None
        self._bytes = TEXT.encode()

    def free_memory(self) -> int | None:
        return machine.free_memory()

    def new_cache(self, pages: int | None = None) -> SimpleNamespace:
        self.pages = PagedCache(pages)
        return SimpleNamespace(pages=self.pages)

    def run(self, step: Step, cache: SimpleNamespace) -> np.ndarray:
        return self._logits(step.positions[step.last])

    def _logits(self, positions: np.ndarray) -> np.ndarray:
        time.sleep(self.delay)
        self.steps += 1
        logits = np.full((len(positions), self.vocab_size), -10.0, dtype=np.float32)
        # Letters, so that samples are readable and differ.
        logits[:, ord("a") : ord("z") + 1] = 8.5
        for row, position in enumerate(positions):
            logits[row, self._bytes[int(position) % len(self._bytes)]] = 12.0
        return logits


def fake_pipeline(folder: Path, **settings: float) -> TextPipeline:
    """A pipeline of a CycleModel and a vocabulary of bytes in `folder`."""
    tokenizer = GPT2Tokenizer(*write_vocabulary(folder))
    return TextPipeline(
        CycleModel(**settings), tokenizer, name="fake", words=Words(title="<b> & Co", text="prompt")
    )


class WordTokenizer:
    """Of ../shared/data/models/capp_gpt2_64d (token_mappings.json): whole names, " | " between."""

    eos_token_id, bos_token_id = 51, 49

    def __init__(self, mapping_file: str) -> None:
        mapping = json.loads(Path(mapping_file).read_text(encoding="utf-8"))
        self._ids = mapping["token2id"]
        self._words = {number: word for word, number in self._ids.items()}
        self.vocab_size = len(self._ids)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[word] for word in text.split(" | ")]
        except KeyError as error:
            raise ValueError(f"there is no word {error}") from error

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return "".join(f" | {self._words[number]}" for number in ids if number != self.eos_token_id)

    def stream_decoder(self) -> WordTokenizer:
        return self

    def feed(self, number: int) -> str:
        return self.decode([number])

    def finish(self) -> str:
        return ""
