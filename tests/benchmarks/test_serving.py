"""The load test of servers: what is asked of them, what is noted, and what is said of it."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from oneflow_accel.errors import UserError

import numpy as np
import openai
import pytest

from benchmarks import serving
from benchmarks.serving import Answer, Request


class Completions(BaseHTTPRequestHandler):
    """Answers by the prompt; counts how many requests it has at once."""

    now, most = 0, 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._begin(200, "application/json")
        self.wfile.write(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        cls = type(self)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["stream"], asked["model"]) == (True, "tiny")
        with cls.lock:
            cls.now += 1
            cls.most = max(cls.most, cls.now)
        way = asked["prompt"]
        self._begin(429 if way == "full" else 200, "text/event-stream")
        for left in reversed(range(asked["max_tokens"])):
            time.sleep(0.6 if way == "slow" else 0.02)
            reason = None if left or way == "broken" else "length"
            if not left:
                # Before the client knows, which asks anew at once.
                with cls.lock:
                    cls.now -= 1
            self._say({"choices": [{"index": 0, "text": "x", "finish_reason": reason}]})
        if way == "error":
            self._say({"error": {"message": "out of memory"}})
        if way == "counted":
            self._say({"choices": [], "usage": {"completion_tokens": 7}})

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _say(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", timeout=5.0, max_retries=0)
        server.shutdown()


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("full", "429"),
        ("broken", "ended early"),
        ("error", "out of memory"),
        ("slow", "too long"),
        ("late", "timed out"),
    ],
)
def test_what_goes_wrong_is_the_answers_error(client, way: str, error: str) -> None:
    due = time.monotonic() - {"slow": 4.3, "late": 6.0}.get(way, 0.0)
    assert error in serving.complete(client, "tiny", Request(0.0, way, 2), due).error


def test_requests_are_sent_as_they_arrive_by_so_many_clients(client) -> None:
    requests = [Request(0.05 * number, "fine", 3) for number in range(8)]
    Completions.now = Completions.most = 0
    answers = serving.load(client, requests, 2)
    assert [(answer.error, answer.tokens) for answer in answers] == [("", 3)] * 8
    assert all(0 < answer.first < answer.last for answer in answers)
    assert Completions.most <= 2
    assert serving.load(client, [Request(0.0, "counted", 3)], 1)[0].tokens == 7


def test_figures_are_medians_and_percentiles() -> None:
    requests = [Request(float(at), "", 3) for at in range(4)]
    answers = [Answer(0.1, 0.3, 3), Answer(0.2, 0.6, 3), Answer(0.3, 0.3, 1), Answer(0, 0, 0, "no")]
    speed, first, first99, token, token99, *_, last99, failed = serving.figures(requests, answers)
    assert speed == pytest.approx(7 / 2.3)
    assert (first, failed) == (pytest.approx(0.2), 1)
    assert first99 == pytest.approx(np.percentile([0.1, 0.2, 0.3], 99))
    assert (token, token99) == (pytest.approx(150), pytest.approx(199))
    assert last99 == pytest.approx(np.percentile([0.3, 0.6, 0.3], 99))
    nothing = serving.figures(requests[3:], answers[3:])
    assert (nothing[0], nothing[-1]) == (0, 1)
    assert all(map(math.isnan, nothing[1:-1]))


def test_requests_are_real_prompts_cut_in_two_or_of_a_length() -> None:
    words = SimpleNamespace(encode=str.split, decode=" ".join)
    lines = ["1 2 3 4 5", "6 7 8", "9", ""]
    drawn = serving.draw_requests(lines, words, 200, 10.0, ())
    assert {len(each.prompt.split()) + each.tokens for each in drawn} == {3, 5}
    times = [request.at for request in drawn]
    assert times == sorted(times)
    assert 15 < times[-1] < 25
    fixed = serving.draw_requests(lines, words, 5, 0.0, (12, 4))
    assert {(len(r.prompt.split()), r.tokens, r.at) for r in fixed} == {(12, 4, 0.0)}
    with pytest.raises(UserError, match="no line"):
        serving.draw_requests(["9"], words, 5, 0.0, ())


def test_a_server_that_ends_says_why() -> None:
    with (
        pytest.raises(UserError, match="no such model"),
        serving.server(1.0, sys.executable, "-c", "import sys; sys.exit('no such model')"),
    ):
        pass
