"""Whatever a request holds, it gets its own answer or its own error, and the next one its own."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pair import Pair
from pipeline_fakes import TEXT, fake_pipeline

from libai_projects.inference import command
from libai_projects.inference.command import JsonLines
from libai_projects.inference.jobs import Worker
from libai_projects.inference.requests import SAMPLING_DEFAULTS
from tests.libai_projects import any_request

# Short, so that an example takes milliseconds.
LIMITS = {"new_tokens": 4, "returns": 3, "prompt_tokens": 40}
PROMPTS = any_request.mostly(
    st.sampled_from(["", "a", "a cute pig", "ö🐷", "a\0b", "x" * 600]), any_request.TEXTS
)


def lines() -> st.SearchStrategy[bytes]:
    """Requests: any options, objects that are none, JSON that is none, bytes that are no text."""
    request = st.builds(
        lambda options, prompt, number: {
            "prompt": prompt, "id": number, "max_new_tokens": 3, **options
        },
        any_request.options(),
        PROMPTS,
        any_request.ANYTHING,
    )  # fmt: skip
    text = any_request.mostly(request, any_request.ANYTHING).map(json.dumps)
    cut = st.builds(lambda whole, end: whole[: end % (len(whole) + 1)], text, st.integers(0, 200))
    spelled = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 5000])
    odd = spelled.map(lambda value: f'{{"prompt": "a", "id": {value}, "temperature": {value}}}')
    as_bytes = any_request.mostly(
        text.map(str.encode), (cut | odd).map(str.encode) | st.binary(max_size=40)
    )
    return as_bytes.map(lambda line: line.replace(b"\n", b" ").strip() or b"?")


# What ended a job, or would have.
LINES = [
    b'{"prompt": "a", "do_sample": true, "temperature": 1e-300, "id": 1}',
    b'{"prompt": "a", "num_beams": 2, "length_penalty": -1e308, "id": 2}',
    b'{"prompt": "a", "num_beams": 2, "length_penalty": 1e308, "id": 3}',
    b'{"prompt": "a", "do_sample": true, "num_return_sequences": 1000000000, "id": 4}',
    b'{"prompt": "a", "self": 1, "id": 5}',
    b'{"prompt": "a", "config": 1, "id": 6}',
    b'{"prompt": "a", "temperature": ' + b"9" * 5000 + b', "id": 7}',
    b'{"prompt": "a", "eos_token_id": 9223372036854775808, "id": 8}',
    b'{"prompt": "a", "temperature": NaN, "id": 9}',
    b'{"prompt": "a", "id": "\\ud800"}',
    b'{"prompt": "a", "\\ud800": 1, "id": 10}',
    b'{"prompt": "a", "id": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "a", "top_k": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "a", "logits_processor": [], "id": 11}',
    b'{"prompt": "' + b"x" * 70_000 + b'", "id": 12}',
    b'{"prompt": "' + b"x" * 1_100_000 + b'", "id": 13}',
    b'{"prompt": "", "id": 14}',
    b'{"prompt": "a\\u0000b", "id": 15}',
    b'{"prompt": true, "id": 16}',
    b'{"prompt": "a", "max_new_tokens": true, "id": 17}',
    b'\xef\xbb\xbf{"prompt": "a", "id": 18}',
    b"\xff\xfe{\x00}\x00",
    b"\x00",
]
GOOD = b'{"prompt": "x", "id": "good", "max_new_tokens": 3}'


def assert_answer(answer: dict[str, Any]) -> None:
    assert {"id", "line"} < set(answer)
    (outcome,) = set(answer) - {"id", "line"}
    if outcome == "error":
        assert answer["error"]
        assert len(answer["error"]) < 1000
        assert "the log says" not in answer["error"]
        return
    assert answer["results"]
    for result in answer["results"]:
        assert set(result) == {"generated_text", "new_tokens", "finish_reason"}
        assert result["new_tokens"] > 0


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    running = Worker(fake_pipeline(tmp_path_factory.mktemp("vocabulary")), queue_length=1)
    thread = threading.Thread(target=running.run)
    thread.start()
    yield running
    running.close()
    thread.join(10)


def as_examples(test: Callable) -> Callable:
    for line in LINES:
        test = example(line)(test)
    return test


@as_examples
@settings(any_request.BOUNDED, max_examples=200)
@given(lines())
def test_each_line_has_its_answer(worker: Worker, line: bytes) -> None:
    written: list[str] = []
    reader = JsonLines(worker, lambda answer: written.append(json.dumps(answer)))
    reader.run(io.BytesIO(line + b"\n" + GOOD))
    first, good = map(json.loads, written)
    assert_answer(first)
    assert reader.bad == ("error" in first)
    assert good["results"][0]["generated_text"] == "x" + TEXT[:3]


def test_a_line_that_is_too_long_is_not_held(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MOST_LINE_BYTES", len(GOOD))
    written: list[dict] = []
    reader = JsonLines(worker, written.append)
    # As long as may be; one byte more, with and without a line's end; many times as long.
    reader.run(io.BytesIO(b"\n".join([GOOD, GOOD + b" ", GOOD * 9, GOOD, GOOD + b" "])))
    assert [answer["line"] for answer in written] == [1, 2, 3, 4, 5]
    assert ["longer than" in answer.get("error", "") for answer in written] == [
        False, True, True, False, True
    ]  # fmt: skip


FIELDS = [*SAMPLING_DEFAULTS, "seed", "stream"]


def bodies() -> st.SearchStrategy[bytes]:
    """Bodies with the fields of the schema, and others."""
    fitting = any_request.options(wrong=False).map(
        lambda options: {name: value for name, value in options.items() if name in FIELDS}
    )
    names = st.sampled_from([*FIELDS, "prompt"]) | any_request.TEXTS
    wrong = st.dictionaries(names, any_request.ANYTHING, max_size=2)
    request = st.builds(
        lambda prompt, stream, *parts: {"prompt": prompt, "stream": stream, **parts[0], **parts[1]},
        PROMPTS,
        st.booleans(),
        fitting,
        any_request.mostly(st.just({}), wrong),
    )
    return any_request.mostly(request.map(json.dumps).map(str.encode), lines())


def assert_served(client: httpx.Client, url: str, body: bytes) -> None:
    answer = client.post(
        f"{url}api/generate", content=body, headers={"Content-Type": "application/json"}
    )
    if answer.status_code == 200:
        last = json.loads(answer.text.splitlines()[-1])
        assert last.get("results"), last
        return
    assert answer.status_code in (413, 422), (answer.status_code, answer.text)
    assert list(answer.json()) == ["error"]
    assert "\n" not in answer.json()["error"]


BODIES = [
    b'{"prompt": "a", "temperature": 1e-300}',
    b'{"prompt": "a", "temperature": 1e-300, "stream": true}',
    b'{"prompt": "a", "temperature": 1.2e-38, "top_p": 1e-320, "typical_p": 1e-320}',
    b'{"prompt": "a", "repetition_penalty": 1e-300}',
    b'{"prompt": "a", "do_sample": false}',
    b'{"prompt": "a", "seed": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
    b"[" * 9000,
]


def test_each_body_has_its_answer(serve: Callable) -> None:
    url = serve(**LIMITS).url
    with httpx.Client(timeout=30) as client:

        @settings(any_request.BOUNDED, max_examples=200)
        @given(bodies())
        def ask(body: bytes) -> None:
            assert_served(client, url, body)

        for body in BODIES:
            assert_served(client, url, body)
        ask()
        assert client.get(f"{url}api/health").json()["status"] == "ok"


@pytest.mark.release
def test_each_line_has_its_answer_on_two_processes(tmp_path: Path) -> None:
    with Pair(tmp_path, "--jsonl") as pair:

        def ask(line: bytes) -> dict[str, Any]:
            pair.process.stdin.write(line + b"\n")
            pair.process.stdin.flush()
            return json.loads(pair.read())

        first = ask(GOOD)
        for line in LINES:
            assert_answer(ask(line))

        @settings(any_request.BOUNDED, max_examples=50)
        @given(lines())
        def each(line: bytes) -> None:
            assert_answer(ask(line))

        each()
        assert ask(GOOD)["results"] == first["results"]
        pair.process.stdin.close()
        assert pair.process.wait(30) != 0
        # Nor is there one that nobody expected.
        assert "failed" not in pair.errors()


@pytest.mark.release
def test_each_body_has_its_answer_on_two_processes(tmp_path: Path) -> None:
    limits = [f"--limit-{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with Pair(tmp_path, "--serve", "--port=0", *limits) as pair, httpx.Client(timeout=60) as client:
        url = re.search(r"http://\S+", pair.read().decode())[0]
        for body in BODIES:
            assert_served(client, url, body)

        @settings(any_request.BOUNDED, max_examples=30)
        @given(bodies())
        def each(body: bytes) -> None:
            assert_served(client, url, body)

        each()
        health = client.get(f"{url}api/health").json()
        assert (health["status"], health["processes"]) == ("ok", 2)
        assert "Traceback" not in pair.errors()
