"""/v1 of --serve as OpenAI's own client finds it, and what programs watch a server by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pipeline_fakes import TEXT
from prometheus_client.parser import text_string_to_metric_families

CLIENT = httpx.Client(verify=False, timeout=30)


def ask(url: str, **settings: Any) -> openai.OpenAI:
    settings = {"api_key": "unused", "max_retries": 0, **settings}
    return openai.OpenAI(base_url=f"{url}v1", http_client=CLIENT, **settings)


@pytest.fixture
def client(serve: Callable) -> openai.OpenAI:
    return ask(serve().url)


GREEDY = {"model": "fake", "temperature": 0, "max_tokens": 12}


def test_models_and_a_completion(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("fake", "model")
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError, match="this is 'fake'"):
        client.models.retrieve("gpt-4")
    answer = client.completions.create(prompt="x", **GREEDY)
    assert (answer.object, answer.model) == ("text_completion", "fake")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, TEXT[:12], "length")
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (1, 12, 13)
    # Sixteen tokens unless said otherwise.
    assert client.completions.create(model="fake", prompt="x").usage.completion_tokens == 16


def test_prompts_of_all_kinds(client: openai.OpenAI) -> None:
    several = client.completions.create(prompt=["x", "xy"], n=2, **GREEDY)
    texts = [choice.text for choice in several.choices]
    assert texts == [TEXT[:12]] * 2 + [TEXT[1:13]] * 2
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    # Each prompt counts once.
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 48)
    for prompt in ([120], [[120], [120, 121]]):
        ids = client.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in ids.choices] == [TEXT[:12], TEXT[1:13]][: len(prompt)]


def test_n_and_seed(client: openai.OpenAI) -> None:
    drawn = {"model": "fake", "prompt": "x", "n": 4, "max_tokens": 30}
    first, again, other = (
        [choice.text for choice in client.completions.create(seed=seed, **drawn).choices]
        for seed in (3, 3, 4)
    )
    assert len(set(first)) == 4
    assert first == again != other


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("field", " in a "),
        (["zzz", "in a f"], " "),
        # The first that is whole.
        (["of möh", "ö"], " in a field of m"),
        ("🐷", None),
    ],
)
def test_stop(client: openai.OpenAI, stop: Any, text: str | None) -> None:
    asked = {**GREEDY, "prompt": "x", "stop": stop, "max_tokens": 29, "logprobs": 1}
    text, reason = (text, "stop") if text is not None else (TEXT[:28], "length")
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (text, reason)
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks][-1] == reason
    # Log probabilities are of what is in the text.
    streamed = [token for chunk in chunks for token in chunk.logprobs.tokens]
    assert streamed == choice.logprobs.tokens
    assert all(offset < len(text) for offset in choice.logprobs.text_offset)


def test_logprobs(client: openai.OpenAI) -> None:
    found = client.completions.create(prompt="x", logprobs=2, **GREEDY).choices[0].logprobs
    assert found.tokens == list(TEXT[:12])
    assert found.text_offset == list(range(12))
    # One score of 12, 25 or 26 of 8.5, and the others of -10: the fake model's distribution.
    assert all(-0.6 < value < -0.5 for value in found.token_logprobs)
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        assert next(iter(top)) == token
        assert len(top) == 2
        low = min(top.values())
        assert max(top.values()) - low == pytest.approx(3.5, abs=1e-4)


def test_a_stream(serve: Callable) -> None:
    client = ask(serve(delay=0.01).url)
    asked = {"model": "fake", "prompt": ["x", "yy"], "n": 2, "max_tokens": 30, "seed": 5}
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    texts, reasons = [""] * 4, [None] * 4
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length"] * 4


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": "a", "max_tokens": 257}, "at most 256", "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "greater than or equal to 0", "temperature"),
    ({"prompt": "a", "frequency_penalty": 0.5}, "less than or equal to 0", "frequency_penalty"),
    ({"prompt": "a", "stop": list("abcde")}, "at most 4", "stop"),
    ({"prompt": "a", "logprobs": 6}, "less than or equal to 5", "logprobs"),
    ({"prompt": "a", "echo": True}, "Input should be False", "echo"),
    ({"prompt": "a", "topp": 1}, "Extra inputs", "topp"),
    ({"prompt": ["a"] * 9}, "at most 8", "n"),
    ({"prompt": "a" * 300}, "300 tokens, 256 are allowed", "prompt"),
    *[
        ({"prompt": value}, "must be a text, a list of token ids", "prompt")
        for value in ([], 3, None, {}, ["a", 1], [1, "a"], [[]], [[True]], [1.5])
    ],
    ({"prompt": [5000]}, "token id 5000", None),
    ({}, "Field required", "prompt"),
]


def test_what_is_refused_is_said_in_openai_s_form(client: openai.OpenAI) -> None:
    for body, words, field in REFUSED:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.post(
                "/completions", cast_to=object, body={"model": "fake", "temperature": 0, **body}
            )
        error = caught.value.body
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert (error["param"] or "").partition(".")[0] == (field or ""), error
    with pytest.raises(openai.NotFoundError, match="this is 'fake'") as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="no chat template"):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError, match="there is no /v1/embeddings"):
        client.embeddings.create(model="fake", input="a")


def test_busy_and_failing_servers(serve: Callable) -> None:
    running = serve(delay=0.02, texts=1, queue=1, request_bytes=400)
    client = ask(running.url)
    slow = {"model": "fake", "prompt": "x", "max_tokens": 250, "stream": True}
    with client.completions.create(**slow) as first:
        next(first)
        with client.completions.create(**slow) as second:
            with pytest.raises(openai.RateLimitError, match="1 requests wait") as caught:
                client.completions.create(**slow)
            assert int(caught.value.response.headers["retry-after"]) > 0
            # Both go away, and leave their places.
            first.close()
            second.close()
    end = time.monotonic() + 5
    while running.worker.waiting or running.worker.busy:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert client.completions.create(prompt="x", **GREEDY).choices[0].text == TEXT[:12]
    with pytest.raises(openai.APIStatusError, match="larger than 400 bytes") as caught:
        client.completions.create(model="fake", prompt="x" * 400)
    assert caught.value.status_code == 413

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    run, running.model.run = running.model.run, broken
    with pytest.raises(openai.InternalServerError, match="the log says why"):
        client.completions.create(prompt="x", **GREEDY)
    with pytest.raises(openai.APIError, match="the log says why"):
        list(client.completions.create(prompt="x", stream=True, **GREEDY))
    running.model.run = run
    # One that ends says so, in the middle of a stream too.
    with client.completions.create(**slow) as stream:
        next(stream)
        running.worker.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_the_key(serve: Callable) -> None:
    url = serve(key="s3cret").url
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY") as caught:
        ask(url, api_key="s3cret2").models.list()
    assert caught.value.code == "invalid_api_key"
    assert ask(url, api_key="s3cret").models.list().data
    body = {"prompt": "a", "max_new_tokens": 2}
    for key, status in (("S3CRET", 401), ("ö", 401), ("s3cret", 200)):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert CLIENT.get(f"{url}metrics", headers=headers).status_code == status
        answer = CLIENT.post(f"{url}api/generate", json=body, headers=headers)
        assert answer.status_code == status
    # The page asks for it, and a monitor need not have it.
    assert CLIENT.get(url).status_code == 200
    assert CLIENT.get(f"{url}health").json()["needs_key"] is True


def test_pages_of_other_servers(serve: Callable) -> None:
    origin = "https://prompts.example.com"
    body = {"prompt": "a", "max_new_tokens": 2}
    preflight = {"Access-Control-Request-Method": "POST"}
    off, on = serve().url, serve(allowed_origins=[origin]).url
    answer = CLIENT.options(f"{on}v1/completions", headers={"Origin": origin, **preflight})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    answer = CLIENT.post(f"{on}api/generate", json=body, headers={"Origin": origin})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    for url, other in ((off, origin), (on, "https://evil.example.com")):
        answer = CLIENT.post(f"{url}api/generate", json=body, headers={"Origin": other})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def numbers(url: str) -> dict[str, float]:
    text = CLIENT.get(f"{url}metrics").text
    return {
        sample.name + "".join(sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics(serve: Callable) -> None:
    running = serve(delay=0.02, texts=2, queue=1)
    client = ask(running.url)
    assert numbers(running.url)["texts_running"] == 0
    client.completions.create(prompt="xyz", **GREEDY)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[5000], **GREEDY)
    found = numbers(running.url)
    assert (found["prompt_tokens_total"], found["new_tokens_total"]) == (3, 12)
    assert (found["requests_totaldone"], found["requests_totalrefused"]) == (1, 1)
    assert found["time_to_first_token_seconds_count"] == 1
    assert 0.02 <= found["time_to_first_token_seconds_sum"] < 5
    two = {"model": "fake", "prompt": "x", "n": 2, "max_tokens": 250, "stream": True}
    with client.completions.create(**two) as first:
        next(first)
        with client.completions.create(**two):
            found = numbers(running.url)
            assert (found["texts_running"], found["requests_waiting"]) == (2, 1)
