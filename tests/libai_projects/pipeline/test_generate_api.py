"""The JSON API of --serve, over real connections to a fake model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from pipeline_fakes import TEXT, fake_pipeline

from libai_projects.inference.connections import AllowedHosts
from libai_projects.inference.jobs import Job, Worker
from libai_projects.inference.requests import Limits
from libai_projects.inference.server import create_app

# Making a client takes longer than most requests here.
CLIENT = httpx.Client(verify=False, timeout=30)


def post(url: str, body: Any, **settings: Any) -> httpx.Response:
    return CLIENT.post(f"{url}api/generate", json=body, **settings)


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_answers(serve: Callable) -> None:
    url = serve().url
    greedy = {"do_sample": False, "num_return_sequences": 1, "max_new_tokens": len(TEXT.encode())}
    answer = post(url, {"prompt": "x", "seed": 7, **greedy})
    assert answer.status_code == 200
    body = answer.json()
    assert body["seed"] == 7
    (result,) = body["results"]
    assert result["generated_text"] == "x" + TEXT
    assert result["new_tokens"] == len(TEXT.encode())
    assert result["finish_reason"] == "length"
    # Four by default, each another; the same seed gives the same.
    several = post(url, {"prompt": "x", "seed": 1}).json()["results"]
    assert len({result["generated_text"] for result in several}) == 4
    assert post(url, {"prompt": "x", "seed": 1}).json()["results"] == several
    # One where greedy decoding can have no more.
    assert len(post(url, {"prompt": "x", "do_sample": False}).json()["results"]) == 1
    drawn = post(url, {"prompt": "x"}).json()
    again = post(url, {"prompt": "x", "seed": drawn["seed"]}).json()
    assert again["results"] == drawn["results"]

    health = CLIENT.get(f"{url}api/health").json()
    assert health["status"] == "ok"
    assert health["model"] == "fake"
    assert health["limits"]["returns"] == 8
    page = CLIENT.get(url)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    # The model's own words, as text.
    assert "<h1>&lt;b&gt; &amp; Co</h1>" in page.text
    assert ">Write prompts</button>" in page.text
    assert "The model continues it." in page.text
    for name in ("style.css", "app.js", "icon.svg"):
        assert CLIENT.get(url + name).status_code == 200
    assert CLIENT.get(f"{url}docs").status_code == 404
    schema = CLIENT.get(f"{url}openapi.json").json()
    assert schema["info"]["title"] == "<b> & Co"
    body = schema["paths"]["/api/generate"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"]["max_new_tokens"]["maximum"] == 256


def test_streams_as_it_comes(serve: Callable) -> None:
    """The pieces come one by one, whole characters, and joined they are the texts."""
    url = serve(delay=0.02).url
    events, times = [], []
    body = {"prompt": "ein Schwein", "stream": True, "max_new_tokens": 45, "seed": 3}
    with CLIENT.stream("POST", f"{url}api/generate", json=body) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        for line in response.iter_lines():
            events.append(json.loads(line))
            times.append(time.monotonic())
    assert events[0] == {"type": "start", "count": 4, "seed": 3}
    assert events[-1]["type"] == "done"
    texts = [""] * 4
    for event in events[1:-1]:
        assert event["type"] == "text"
        assert event["text"]
        texts[event["index"]] += event["text"]
    given = [result["generated_text"] for result in events[-1]["results"]]
    assert given == ["ein Schwein" + text for text in texts]
    # 45 steps of 20 ms: what came first came long before the end.
    assert times[-1] - times[1] > 0.4
    # The same without streaming.
    del body["stream"]
    whole = post(url, body).json()["results"]
    assert [result["generated_text"] for result in whole] == given


OUT_OF_BOUNDS: list[tuple[Any, str]] = [
    ({}, "prompt: Field required"),
    ({"prompt": 3}, "prompt:"),
    ({"prompt": "  "}, "prompt: type something first"),
    ({"prompt": "a\0b"}, "NUL"),
    ({"prompt": "a", "temperatures": 1.0}, "temperatures"),
    ({"prompt": "a", "temperature": 0}, "temperature: "),
    ({"prompt": "a", "max_new_tokens": 257}, "less than or equal to 256"),
    ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens"),
    ({"prompt": "a", "num_return_sequences": 9}, "less than or equal to 8"),
    ({"prompt": "a", "seed": -1}, "seed"),
    ({"prompt": "a", "do_sample": False, "num_return_sequences": 4}, "leave one of the two out"),
    ({"prompt": "x" * 257}, "257 tokens, 256 are allowed"),
    ([1], "object"),
]


def test_refuses_what_is_out_of_bounds(serve: Callable) -> None:
    url = serve().url
    for body, words in OUT_OF_BOUNDS:
        answer = post(url, body)
        assert answer.status_code == 422, body
        assert words in answer.json()["error"], body
        assert "\n" not in answer.json()["error"]


def test_refuses_bodies_that_are_not_small_json(serve: Callable) -> None:
    running = serve(request_bytes=200)
    url = f"{running.url}api/generate"
    kind = {"Content-Type": "application/json"}
    assert CLIENT.post(url, content=b'{"prompt', headers=kind).status_code == 422
    assert CLIENT.post(url, content=b'{"prompt": "\\ud800"}', headers=kind).status_code == 422
    assert CLIENT.post(url, content=b"\xff\xfe", headers=kind).status_code == 422
    # A form of another site can send this without asking; JSON it cannot.
    assert CLIENT.post(url, content=b'{"prompt": "a"}').status_code == 415
    large = json.dumps({"prompt": "x" * 300}).encode()
    assert CLIENT.post(url, content=large, headers=kind).status_code == 413
    # In chunks, without a length that says so beforehand.
    chunks = (large[start : start + 50] for start in range(0, len(large), 50))
    assert CLIENT.post(url, content=chunks, headers=kind).status_code == 413
    assert CLIENT.get(url).status_code == 405
    # One that does not send what it announced.
    slow = serve(seconds=0.3).url
    host, port = slow.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(
            b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert running.model.steps == 0


def test_time_limit_and_queue(serve: Callable) -> None:
    # Four texts at once are one request's.
    running = serve(delay=0.05, seconds=0.6, queue=1, texts=4)
    bodies = {"prompt": "a", "max_new_tokens": 200}
    answers: dict[int, httpx.Response] = {}

    def ask(number: int) -> None:
        answers[number] = post(running.url, bodies)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    threads[0].start()
    wait_until(lambda: running.worker.busy)
    threads[1].start()
    wait_until(lambda: running.worker.waiting == 1)
    # One runs, one waits: there is no place for a third.
    third = post(running.url, bodies)
    assert third.status_code == 429
    assert third.headers["retry-after"]
    for thread in threads:
        thread.join()
    # The first used up its time, and with it nearly all of the one's behind it.
    first = answers[0].json()["results"]
    assert {result["finish_reason"] for result in first} == {"time"}
    assert 2 <= first[0]["new_tokens"] <= 13
    if answers[1].status_code == 200:
        assert answers[1].json()["results"][0]["new_tokens"] < first[0]["new_tokens"]
    else:
        assert answers[1].status_code == 503
        assert "no time was left" in answers[1].json()["error"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_request(serve: Callable, stream: bool) -> None:
    running = serve(delay=0.03, seconds=60)
    body = json.dumps({"prompt": "a", "max_new_tokens": 250, "stream": stream}).encode()
    host, port = running.url.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = (
            f"POST /api/generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        wait_until(lambda: running.model.steps > 3)
    wait_until(lambda: not running.worker.busy, seconds=3)
    assert running.model.steps < 60


def test_a_client_that_goes_away_before_its_stream_begins(tmp_path: Path) -> None:
    pipeline = fake_pipeline(tmp_path)
    worker = Worker(pipeline)
    app = create_app(worker, Limits(), AllowedHosts("127.0.0.1"))
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/generate", "headers": headers}
    scope |= {"query_string": b"", "asgi": {"spec_version": "2.3"}}

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(_: Any) -> None:
        await asyncio.sleep(0)

    asyncio.run(app(scope, receive, send))
    assert worker.waiting == 1
    worker.close(finish=True)
    worker.run()
    assert pipeline.model.steps == 0


def test_a_job_that_the_other_processes_cannot_be_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked hears of it, and the server ends: the others wait for what never comes."""
    worker = Worker(fake_pipeline(tmp_path))
    monkeypatch.setattr(worker, "_tell", Mock(side_effect=RuntimeError("a process has ended")))
    job = Job(["a"], {})
    worker.submit(job)
    with pytest.raises(RuntimeError, match="has ended"):
        worker.run()
    assert job.texts.exception().kind == "failed"


def test_shutting_down_answers_everyone(serve: Callable) -> None:
    running = serve(delay=0.05, texts=4)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(post(running.url, {"prompt": "a", "max_new_tokens": 200}))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: running.worker.busy and running.worker.waiting == 1)
    running.worker.close()
    for thread in threads:
        thread.join(10)
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    stopped = next(answer for answer in answers if answer.status_code == 200).json()
    assert stopped["results"][0]["finish_reason"] == "cancelled"


def test_a_failing_model_does_not_end_the_server(serve: Callable) -> None:
    running = serve()
    run = running.model.run

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    running.model.run = broken
    answer = post(running.url, {"prompt": "a"})
    assert answer.status_code == 500
    assert "log" in answer.json()["error"]
    assert "memory" not in answer.text
    running.model.run = run
    assert post(running.url, {"prompt": "a"}).status_code == 200


def test_a_job_cancelled_or_late_before_its_turn_is_not_run(serve: Callable) -> None:
    running = serve()
    cancelled, late = Job(["a"], {}), Job(["a"], {}, deadline=time.monotonic() - 1)
    cancelled.cancelled.set()
    for job in (cancelled, late):
        running.worker.submit(job)
    assert [job.texts.exception(10).kind for job in (cancelled, late)] == ["cancelled", "late"]
    assert running.model.steps == 0
