"""Many requests at once: each text is what it is alone, whoever comes and goes beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_fakes import fake_pipeline, write_vocabulary

from libai_projects.inference.jobs import CHUNK, Job, Worker
from libai_projects.inference.text_pipeline import TextPipeline
from libai_projects.inference.texts import Piece
from libai_projects.models.gpt2.model import GPT2StepModel
from libai_projects.models.pages import Step
from libai_projects.text.tokenizer import GPT2Tokenizer
from tests.libai_projects import reference_gpt2
from tests.libai_projects.magicprompt.gpt2_models import make

SHAPE = reference_gpt2.Shape(vocabulary=257, positions=512)
SAMPLE = {"do_sample": True, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TextPipeline:
    """A real model: each text depends on every key of its own, and on no other's."""
    tokenizer = GPT2Tokenizer(*write_vocabulary(tmp_path_factory.mktemp("vocabulary")))
    model = GPT2StepModel(make(reference_gpt2.random_state(SHAPE), SHAPE))
    return TextPipeline(model, tokenizer)


def run(engine: TextPipeline, jobs: list[Job], **settings: Any) -> Worker:
    """Work until all of these are done."""
    worker = Worker(engine, queue_length=100, **settings)
    for job in jobs:
        worker.submit(job)
    worker.close(finish=True)
    worker.run()
    return worker


REQUESTS: list[tuple[list, dict[str, Any]]] = [
    *[(["a cute pig"], SAMPLE | {"seed": 3})] * 12,
    (["a cute pig"], {"max_new_tokens": 30}),
    (["x", "a dog " * 60, "öö"], SAMPLE | {"num_return_sequences": 3, "seed": 5}),
    (["y"], SAMPLE | {"seed": [7], "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
    ([[104, 105]], {"max_new_tokens": 70, "logprobs": 2}),
    (["long " * 100], SAMPLE | {"top_p": 0.9, "num_return_sequences": 2}),
    (["long " * 100 + "end"], {"max_length": 507}),
    (["z"], {"num_beams": 2, "max_new_tokens": 5}),
    (["z" * 63], SAMPLE | {"num_return_sequences": 4, "seed": 2, "max_new_tokens": 70}),
    (["a"], {"use_cache": False, "max_new_tokens": 3}),
]


def test_each_text_is_what_it_is_alone(engine: TextPipeline) -> None:
    alone = [engine.generate(prompts, **options) for prompts, options in REQUESTS]
    pieces: list[dict[int, str]] = [{} for _ in REQUESTS]

    def tell(into: dict[int, str]) -> Callable[[Piece], None]:
        return lambda piece: into.update({piece.index: into.get(piece.index, "") + piece.text})

    jobs = [
        Job(prompts, options, tell(into))
        for (prompts, options), into in zip(REQUESTS, pieces, strict=True)
    ]
    worker = run(engine, jobs)
    for job, expected, said in zip(jobs, alone, pieces, strict=True):
        found = job.texts.result(0)
        assert [text.text for text in found] == [text.text for text in expected]
        assert [text.finish_reason for text in found] == [each.finish_reason for each in expected]
        if job.options.get("num_beams") is None:
            assert [text.added for text in found] == [said[index] for index in sorted(said)]
    assert worker.batcher.texts == 0
    assert worker.batcher.cache.pages.free == worker.batcher.capacity


@pytest.fixture
def pipeline(tmp_path: Path) -> TextPipeline:
    return fake_pipeline(tmp_path)


def spied(pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that its model runs from now on."""
    seen, run_one = list[Step](), pipeline.model.run
    monkeypatch.setattr(
        pipeline.model, "run", lambda step, cache: seen.append(step) or run_one(step, cache)
    )
    return seen


@pytest.fixture
def steps(pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    return spied(pipeline, monkeypatch)


def counts(step: Step) -> list[int]:
    """Tokens of each sequence that a step reads."""
    return np.bincount(step.sequences).tolist()


def test_they_join_and_leave_between_two_tokens(pipeline: TextPipeline, steps: list[Step]) -> None:
    late = Job(["bb"], {"max_new_tokens": 3})

    def on_text(_piece: Piece) -> None:
        if len(steps) == 4:
            worker.submit(late)

    worker = Worker(pipeline)
    worker.submit(Job(["a"], {"max_new_tokens": 10}, on_text))
    late.texts.add_done_callback(lambda _: worker.close(finish=True))
    worker.run()
    assert [counts(step) for step in steps] == [[1]] * 4 + [[1, 2], [1, 1], [1, 1]] + [[1]] * 3


def test_long_prompts_are_read_in_chunks(pipeline: TextPipeline, steps: list[Step]) -> None:
    jobs = [Job([text], {"max_new_tokens": 8}) for text in ("a", "b" * 500, "c" * 450, "d" * 9)]
    run(pipeline, jobs)
    read = [counts(step) for step in steps]
    # The first has a token in each step, and the last does not wait for the long ones to be read.
    assert read[0] == [1, 128, 64, 9]
    assert read[1] == [1, 128, 128, 1]
    assert all(sum(step) <= CHUNK + 4 for step in read)
    assert [job.texts.result(0)[0].new_tokens for job in jobs] == [8] * 4


def test_equal_beginnings_are_read_once(
    engine: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = spied(engine, monkeypatch)
    text = "a dog " * 40
    prompts = [text, text + "y"]
    first, second = (Job([prompt], {"max_new_tokens": 20}) for prompt in prompts)
    worker = Worker(engine)
    worker.submit(first)
    first.texts.add_done_callback(lambda _: worker.submit(second))
    second.texts.add_done_callback(lambda _: worker.close(finish=True))
    worker.run()
    # Three whole pages of 64 tokens were there.
    assert [len(step.ids) for step in steps if len(step.ids) > 1] == [240, 241 - 192]
    alone = engine.generate(prompts, max_new_tokens=20)
    assert [job.texts.result()[0].text for job in (first, second)] == [each.text for each in alone]


@pytest.fixture
def small(pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> TextPipeline:
    """A cache of eight pages: of one text as long as the model's positions."""
    monkeypatch.setattr(pipeline.model, "page_bytes", 10**15)
    return pipeline


def test_who_finds_no_pages_waits(small: TextPipeline, steps: list[Step]) -> None:
    # Five pages and two; five more, for which the first has to end; one, which came last.
    sizes = [(300, 20), (100, 20), (300, 20), (10, 5)]
    jobs = [
        Job([text * size], {"max_new_tokens": new})
        for text, (size, new) in zip("abcd", sizes, strict=True)
    ]
    ended: list[int] = []
    for number, job in enumerate(jobs):
        job.texts.add_done_callback(lambda _, number=number: ended.append(number))
    run(small, jobs)
    assert ended == [1, 0, 3, 2]
    assert max(step.tables.max() for step in steps) < 8
    assert [job.texts.result(0)[0].new_tokens for job in jobs] == [new for _, new in sizes]


def test_what_never_fits_is_refused_alone(small: TextPipeline) -> None:
    good = Job(["x"], {"max_new_tokens": 2})
    many = Job(["x" * 400], {"do_sample": True, "num_return_sequences": 9, "max_new_tokens": 60})
    run(small, [many, good])
    assert "the cache has 8: ask for fewer or shorter ones" in str(many.texts.exception(0))
    assert many.texts.exception(0).kind == "refused"
    assert good.texts.result(0)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(fake_pipeline(tmp_path, delay=0.01), most_texts=2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    worker.close()
    thread.join(10)
    assert not thread.is_alive()


def begun(job: Job) -> None:
    end = time.monotonic() + 5
    while job.first_token is None:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_who_goes_away_frees_its_place_at_once(slow: Worker) -> None:
    first, second, third = (Job(["x"], {"max_new_tokens": 400}) for _ in range(3))
    waiting, late = Job(["x"], {}), Job(["x"], {}, deadline=time.monotonic() + 0.1)
    for job in (first, second, waiting, late, third):
        slow.submit(job)
    begun(second)
    assert (slow.waiting, slow.batcher.texts) == (3, 2)
    waiting.cancelled.set()
    assert waiting.texts.exception(1).kind == "cancelled"
    assert late.texts.exception(1).kind == "late"
    assert third.first_token is None
    first.cancelled.set()
    begun(third)
    (text,) = first.texts.result(1)
    assert text.finish_reason == "cancelled"
    assert text.text == "x" + text.added
    assert 0 < text.new_tokens < 400
    # The others have noticed nothing.
    assert not second.texts.done()
    slow.close(grace=0.3)
    assert [job.texts.result(5)[0].finish_reason for job in (second, third)] == ["cancelled"] * 2
    assert len(second.texts.result()[0].added.encode()) > 20


def test_sigterm_lets_texts_end(slow: Worker) -> None:
    running, waiting = (Job(["x"], {"max_new_tokens": 40, "num_return_sequences": 2,
                                    "do_sample": True}) for _ in range(2))  # fmt: skip
    slow.submit(running)
    slow.submit(waiting)
    begun(running)
    slow.close(grace=10)
    assert waiting.texts.exception(1).kind == "closed"
    assert [text.new_tokens for text in running.texts.result(5)] == [40, 40]
