"""Texts that end with a stop string, or before it."""

from __future__ import annotations

from random import Random
from typing import Any

from oneflow_accel.errors import UserError

import pytest

from libai_projects.generation import GenerationOptions, generate
from libai_projects.inference.text_pipeline import TextPipeline
from libai_projects.inference.texts import Piece, TextOf
from libai_projects.text.tokenizer import Tokenizer
from tests.libai_projects.generation import tiny_gpt2
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2


class Words(Tokenizer):
    """A tokenizer of these words."""

    bos_token_id, eos_token_id = 0, None

    def __init__(self, words: list[str]) -> None:
        self.vocab_size = len(words)
        self._bytes = [word.encode() for word in words]


def first_end(text: str, stops: list[str], after: int) -> int | None:
    """Where the first stop string ends that does not end within so many characters."""
    ends = [end for end in range(after + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    return min(ends, default=None)


def test_the_tokens_of_transformers(model: NumpyGPT2, golden: dict[str, Any]) -> None:
    pipeline = TextPipeline(model, Words(tiny_gpt2.WORDS), options={"eos_token_id": None})
    found = set()
    for case in golden["stops"]:
        prompt, stops = case["prompt"], case["name"]
        (text,) = pipeline.generate([prompt], stop_strings=stops, max_length=30)
        whole, given = map(pipeline.tokenizer.decode, (case["sequence"], prompt))
        assert text.new_tokens == len(case["sequence"]) - len(prompt), case
        end = first_end(whole, stops, len(given))
        assert text.text == whole[:end]
        assert text.finish_reason == ("length" if end is None else "stop")
        found.add((text.finish_reason, end == len(whole), end is None or end > len(given) + 2))
    # At the end of a token and within it, in the first and later ones, and in none.
    assert len(found) >= 4


@pytest.mark.parametrize("keeps", [True, False])
def test_text_before_and_after_stop_strings_in_pieces(keeps: bool) -> None:
    random, ended = Random(4), 0

    def letters(least: int, most: int) -> str:
        return "".join(random.choices("abö", k=random.randint(least, most)))

    for _ in range(1000):
        words, stops = [letters(0, 3) for _ in range(8)], [letters(1, 4) for _ in range(2)]
        before, pieces = letters(4, 4), list[Piece]()
        text = TextOf(
            Words(words), 0, before, stops=stops, keeps_stop=keeps, on_piece=pieces.append
        )
        # Where a stop string is left out, the prompt is none of its business.
        whole = given = before if keeps else ""
        for token in random.choices(range(8), k=6):
            whole += words[token]
            end = first_end(whole, stops, len(given))
            assert text.feed(token) is (end is not None)
            if end is not None:
                found = max(len(stop) for stop in stops if whole[:end].endswith(stop))
                whole = whole[: end if keeps else end - found]
                ended += 1
                break
        text.finish("length")
        expected = whole[len(given) :]
        assert text.text == "".join(piece.text for piece in pieces) == expected
    assert 300 < ended < 950


@pytest.mark.parametrize("option", [{"stop_strings": "a"}, {"logprobs": 1}])
def test_what_beams_do_not_have(option: dict[str, Any], model: NumpyGPT2) -> None:
    with pytest.raises(UserError, match="num_beams at 1"):
        GenerationOptions(num_beams=2, **option)
    with pytest.raises(UserError, match="none of them empty"):
        GenerationOptions(stop_strings=["a", ""])
    if "stop_strings" in option:
        with pytest.raises(UserError, match="TextPipeline"):
            generate(model, [[1]], GenerationOptions(**option))
