"""Two processes behind one port."""

from __future__ import annotations

import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from pair import Pair

ASKED: dict[str, Any] = {"model": "random weights", "prompt": "a dog", "max_tokens": 20}


def rank_1(pair: Pair) -> psutil.Process:
    children = psutil.Process(pair.process.pid).children(recursive=True)
    (found,) = (child for child in children if child.environ().get("RANK") == "1")
    return found


def test_they_write_together_and_end_together(tmp_path: Path) -> None:
    with Pair(tmp_path, "--serve", "--port=0") as pair, httpx.Client(timeout=60) as http:
        url = re.search(r"http://\S+", pair.read().decode())[0]
        client = openai.OpenAI(base_url=f"{url}v1", api_key="none", http_client=http, max_retries=0)

        def text(seed: int) -> str:
            return client.completions.create(seed=seed, **ASKED).choices[0].text

        alone = [text(seed) for seed in range(8)]
        assert len(set(alone)) == 8
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(text, range(8))) == alone
        # One that stops makes the other wait; one that dies ends the server, which says so to
        # whom it writes, and to whom it has not begun to.
        other = rank_1(pair)
        other.send_signal(signal.SIGSTOP)
        stream = client.completions.create(stream=True, **ASKED)
        problems: list[Exception] = []

        def ask() -> None:
            with pytest.raises(openai.InternalServerError) as caught:
                text(1)
            problems.append(caught.value)

        thread = threading.Thread(target=ask)
        thread.start()
        other.kill()
        with pytest.raises(openai.APIError, match="a process of this server ended"):
            list(stream)
        thread.join()
        assert "the server is shutting down" in str(problems[0])
        assert pair.process.wait(30) != 0
        assert "watchdog: rank 1" in pair.errors()
