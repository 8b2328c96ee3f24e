"""The load test of servers: what is asked of them, what is noted, and what is said of it."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import pytest

from benchmarks import serving
from benchmarks.serving import Answer, Request


class Tokenizer:
    """A token a word."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Completions(BaseHTTPRequestHandler):
    """Answers by the prompt; counts how many requests it has at once."""

    now, most = 0, 0
    lock = threading.Lock()
    last: Mapping[str, Any] = MappingProxyType({})

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        cls = type(self)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with cls.lock:
            cls.last = asked
            cls.now += 1
            cls.most = max(cls.most, cls.now)
        way = asked["prompt"]
        self.send_response(429 if way == "full" else 200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(asked["max_tokens"]):
            time.sleep(0.6 if way == "slow" else 0.02)
            is_last = number == asked["max_tokens"] - 1 and way != "broken"
            self._say({"choices": [{"text": "x", "finish_reason": "length" if is_last else None}]})
        if way == "error":
            self._say({"error": {"message": "out of memory"}})
        if way == "counted":
            self._say({"choices": [], "usage": {"completion_tokens": 7}})
        with cls.lock:
            cls.now -= 1
        self.wfile.write(b"data: not JSON\n\n" if way == "torn" else b"data: [DONE]\n\n")

    def _say(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_stream_is_asked_for_and_timed(url) -> None:
    due = time.monotonic() - 1.0
    answer = serving.complete(url, "tiny", Request(0.0, "fine", [1], 3), due, 5.0)
    assert (answer.error, answer.tokens) == ("", 3)
    # From the arrival, a second before it was sent.
    assert 1.0 < answer.first < answer.last < 3.0
    sent = Completions.last
    assert (sent["max_tokens"], sent["stream"], sent["temperature"]) == (3, True, 0)
    counted = serving.complete(url, "tiny", Request(0.0, "counted", [1], 3), due, 5.0)
    assert counted.tokens == 7


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("full", "429"),
        ("broken", "ended early"),
        ("torn", "JSONDecodeError"),
        ("error", "out of memory"),
        ("slow", "timed out"),
    ],
)
def test_what_goes_wrong_is_the_answers_error(url, way: str, error: str) -> None:
    limit = 0.2 if way == "slow" else 5.0
    answer = serving.complete(url, "tiny", Request(0.0, way, [1], 2), time.monotonic(), limit)
    assert error in answer.error


def test_a_request_without_a_server_or_a_client_in_time_is_an_error() -> None:
    request = Request(0.0, "fine", [1], 2)
    nobody = serving.complete("http://127.0.0.1:1", "tiny", request, time.monotonic(), 5.0)
    assert "refused" in nobody.error
    late = serving.complete("http://127.0.0.1:1", "tiny", request, time.monotonic() - 6.0, 5.0)
    assert "no client was free" in late.error


def test_requests_are_sent_as_they_arrive_by_so_many_clients(url) -> None:
    requests = [Request(0.05 * number, "fine", [1], 3) for number in range(8)]
    Completions.now = Completions.most = 0
    answers = serving.load(url, 5.0, requests, 2)
    assert [answer.error for answer in answers] == [""] * 8
    assert Completions.most <= 2
    assert Completions.last["model"] == "tiny"
    speed, first, *_, failed = serving.figures(requests, answers)
    assert 0 < speed < 24 / 0.35
    assert (0 < first < 2, failed) == (True, 0)


def test_figures_are_medians_and_percentiles() -> None:
    requests = [Request(float(at), "", [1], 3) for at in range(4)]
    answers = [Answer(0.1, 0.3, 3), Answer(0.2, 0.6, 3), Answer(0.3, 0.3, 1), Answer(0, 0, 0, "no")]
    speed, first, first99, token, token99, *_, last99, failed = serving.figures(requests, answers)
    assert speed == pytest.approx(7 / 2.3)
    assert (first, failed) == (pytest.approx(0.2), 25)
    assert first99 == pytest.approx(np.percentile([0.1, 0.2, 0.3], 99))
    assert (token, token99) == (pytest.approx(150), pytest.approx(199))
    assert last99 == pytest.approx(np.percentile([0.3, 0.6, 0.3], 99))
    nothing = serving.figures(requests[3:], answers[3:])
    assert (nothing[0], nothing[-1]) == (0, 100)
    assert all(map(math.isnan, nothing[1:-1]))


def test_requests_are_real_prompts_cut_in_two_or_of_a_length() -> None:
    lines = ["1 2 3 4 5", "6 7 8", "9", ""]
    drawn = serving.draw_requests(lines, Tokenizer(), 200, 10.0, None)
    assert drawn == serving.draw_requests(lines, Tokenizer(), 200, 10.0, None)
    assert {len(request.ids) + request.tokens for request in drawn} == {3, 5}
    assert all(request.prompt == " ".join(map(str, request.ids)) for request in drawn)
    times = [request.at for request in drawn]
    assert times == sorted(times)
    assert 15 < times[-1] < 25
    fixed = serving.draw_requests(lines, Tokenizer(), 5, 0.0, (12, 4))
    assert {(len(r.ids), r.tokens, r.at) for r in fixed} == {(12, 4, 0.0)}
    with pytest.raises(UserError, match="no line"):
        serving.draw_requests(["9"], Tokenizer(), 5, 0.0, None)
