"""What rank 0 tells the others, with the messages in hand instead of processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import pytest
from pipeline_fakes import TEXT, fake_pipeline

from libai_projects.inference import jobs, lockstep
from libai_projects.inference.jobs import Job, Worker


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "all_reduce_sum", list)
    monkeypatch.setattr(distributed, "all_gather_json", lambda own: [own, None])
    return


def test_rank_0_tells_the_others(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(jobs, "on_rank_0", lambda action: told.append(action()))
    monkeypatch.setattr(lockstep, "HEARTBEAT_SECONDS", 0.15)
    worker = Worker(fake_pipeline(tmp_path))
    thread = threading.Thread(target=worker.run)
    thread.start()
    beams = {"max_new_tokens": 3, "num_beams": 2}
    for options in ({"max_new_tokens": 3}, beams):
        job = Job(["xyz"], options)
        worker.submit(job)
        assert job.texts.result(5)[0].text == "xyz" + TEXT[2:5]
    # While nothing is asked for, the others hear that they have to wait.
    end = time.monotonic() + 5
    while len(told) < 6 and time.monotonic() < end:
        time.sleep(0.02)
    worker.close()
    thread.join(5)
    # A step is all that they need: which tokens are read where.
    assert [message["do"] for message in told[:4]] == ["step"] * 3 + ["generate"]
    prompt, token = (told[number]["step"] for number in (0, 1))
    assert (prompt.ids.tolist(), prompt.last.tolist()) == ([*b"xyz"], [2])
    assert (token.ids.tolist(), token.positions.tolist()) == ([ord(TEXT[2])], [3])
    assert prompt.tables == token.tables == [[0]]
    assert told[3] == {"do": "generate", "prompts": ["xyz"], "options": beams}
    assert told[4:-1]
    assert {message["do"] for message in told[4:-1]} == {"wait"}
    assert told[-1] == {"do": "end"}


def test_the_others_do_what_they_are_told(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipeline = fake_pipeline(tmp_path)
    cache = pipeline.model.new_cache()
    step = pipeline.model.plan(cache, [(cache.pages.add()[0], [1, 2, 3])])
    messages = iter(
        [
            {"do": "wait"},
            {"do": "step", "step": step},
            {"do": "generate", "prompts": ["x"], "options": {"max_new_tokens": 3}},
            # Refused by rank 0 as well; it goes on.
            {"do": "generate", "prompts": ["x" * 600], "options": {}},
            {"do": "generate", "prompts": ["x"], "options": {"max_new_tokens": 4}},
            {"do": "end"},
        ]
    )
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    monkeypatch.setattr(jobs, "on_rank_0", lambda _action: next(messages))
    Worker(pipeline).run()
    assert pipeline.model.steps == 1 + 3 + 4
    assert list(messages) == []


def test_a_rank_that_fails_inside_a_step_ends_the_job(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "on_rank_0", lambda action: action())
    pipeline = fake_pipeline(tmp_path)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    pipeline.model.run = broken
    for options in ({}, {"num_beams": 2}):
        worker = Worker(pipeline, most_texts=1)
        submitted = [Job(["x"], options) for _ in range(2)]
        for job in submitted:
            worker.submit(job)
        with pytest.raises(lockstep.OutOfStepError, match="out of memory"):
            worker.run()
        assert [job.texts.exception(5).kind for job in submitted] == ["failed", "closed"]


def test_what_fails_between_steps_is_its_request_s_alone(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(jobs, "on_rank_0", lambda action: told.append(action()))
    worker = Worker(fake_pipeline(tmp_path))

    def broken(_piece: Any) -> None:
        raise MemoryError

    thread = threading.Thread(target=worker.run)
    thread.start()
    bad = Job(["x"], {}, broken), Job(["x"], {"temperature": 0})
    good = Job(["x"], {"max_new_tokens": 3})
    for job in (*bad, good):
        worker.submit(job)
    assert [job.texts.exception(5).kind for job in bad] == ["failed", "refused"]
    assert good.texts.result(5)
    worker.close()
    thread.join(5)
    assert told[-1] == {"do": "end"}


def test_a_fault_of_another_rank_has_its_name(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda _numbers: [1.0, 0.0])
    for users, kind in ((True, UserError), (False, lockstep.OtherRankError)):
        problem = {"users": users, "text": "no memory"}
        monkeypatch.setattr(distributed, "all_gather_json", lambda _own, it=problem: [None, it])
        with pytest.raises(kind, match="rank 1: no memory"), lockstep.in_step():
            pass
