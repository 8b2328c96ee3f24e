"""The pipeline's call: defaults, options, batches, ranks, stopping."""

from __future__ import annotations

import time
from pathlib import Path

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import pytest
from pipeline_fakes import TEXT, CycleModel, fake_pipeline

from libai_projects.inference.text_pipeline import TextPipeline
from libai_projects.inference.texts import Piece


@pytest.fixture
def pipeline(tmp_path: Path) -> TextPipeline:
    return fake_pipeline(tmp_path)


def test_fifty_tokens_unless_said_otherwise(pipeline: TextPipeline) -> None:
    (result,) = pipeline("x")
    assert list(result) == ["generated_text"]
    assert result["generated_text"].encode() == ("x" + TEXT * 2).encode()[:50]
    (short,) = pipeline(["x"], max_length=10)
    assert short["generated_text"] == ("x" + TEXT)[:10]
    (more,) = pipeline(["x"], max_new_tokens=70)
    assert len(more["generated_text"].encode()) >= 71
    # Options of the construction stand between the two.
    own = TextPipeline(pipeline.model, pipeline.tokenizer, options={"max_length": 12})
    assert own("x")[0]["generated_text"] == ("x" + TEXT)[:12]
    assert own("x", max_length=7)[0]["generated_text"] == ("x" + TEXT)[:7]


def test_batches_change_nothing(pipeline: TextPipeline) -> None:
    prompts = ["a dog", "x", "a cute pig"]
    sampled = {"do_sample": True, "num_return_sequences": 2, "seed": 5}
    whole = pipeline(prompts, **sampled)
    assert len(whole) == 6
    assert pipeline(prompts, batch_size=2, **sampled) == whole
    assert pipeline(prompts, batch_size=1, **sampled) == whole
    assert whole[0] != whole[1]


def test_only_rank_0_has_texts(pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    assert pipeline("x") == {}


def test_pieces_are_the_text(pipeline: TextPipeline) -> None:
    pieces: dict[int, str] = {0: "", 1: "", 2: "", 3: ""}

    def on_text(piece: Piece) -> None:
        pieces[piece.index] += piece.text

    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 60}
    texts = pipeline.generate(["a", "bb"], on_text=on_text, **options)
    assert [text.text for text in texts] == [
        ("a", "bb")[index // 2] + pieces[index] for index in range(4)
    ]
    assert [text.prompt for text in texts] == [0, 0, 1, 1]
    # Beam search knows its text at the end only.
    beams = pipeline.generate(["a"], on_text=lambda *_: pytest.fail("a piece"), num_beams=2)
    assert beams[0].text.startswith("a in a field")


def test_stops_when_told(pipeline: TextPipeline) -> None:
    asked: list[int] = []

    def stop() -> str | None:
        asked.append(1)
        return "cancelled" if len(asked) == 3 else None

    (text,) = pipeline.generate(["x"], should_stop=stop)
    assert text.new_tokens == 3
    assert text.finish_reason == "cancelled"
    slow = TextPipeline(CycleModel(delay=0.03), pipeline.tokenizer)
    started = time.monotonic()
    (late,) = slow.generate(["x"], max_time=0.2, max_new_tokens=200)
    assert late.finish_reason == "time"
    assert time.monotonic() - started < 2
    (full,) = pipeline.generate(["x" * 500], max_new_tokens=200)
    assert (full.new_tokens, full.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_lenght": 5}, "did you mean 'max_length'"),
        ({"max_length": 513}, "max_length is 513, but the model has 512 positions"),
        ({"temperature": -1.0}, "temperature"),
        ({"num_return_sequences": 2}, "greedy"),
    ],
)
def test_refuses_options(pipeline: TextPipeline, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pipeline("x", **options)
    with pytest.raises(UserError, match=words):
        pipeline.check_options(options)


def test_refuses_texts_and_vocabularies(pipeline: TextPipeline) -> None:
    with pytest.raises(UserError, match="surrogate"):
        pipeline("\ud800")
    with pytest.raises(UserError, match="no prompt"):
        pipeline([])
    model = CycleModel()
    model.vocab_size = 300
    with pytest.raises(UserError, match="257 tokens, the model 300"):
        TextPipeline(model, pipeline.tokenizer)
