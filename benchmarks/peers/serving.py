"""Requests to transformers' `generate`, for benchmarks.serving, in the order in which they arrive.

    python -m benchmarks.peers.serving FOLDER       writes a model of GPT-2 small's shape
    python -m benchmarks.peers.serving FILE.json    prints a line of JSON: an Answer for each

FILE has the folder of a `model`, how many sequences make a `batch`, `threads`, the `seconds` that a
request may take, and `requests`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from benchmarks.peers.models import fastest_dtype


def answer(model: Any, batch: int, requests: list[dict[str, Any]], limit: float) -> list[Any]:
    """All that have arrived when the batch before is done make the next one, `batch` at most; it is
    as long as its longest."""
    found: list[dict[str, Any]] = []
    began = time.perf_counter()
    while len(found) < len(requests):
        rest = requests[len(found) :]
        time.sleep(max(0.0, rest[0]["at"] - (time.perf_counter() - began)))
        now = time.perf_counter() - began
        if now - rest[0]["at"] > limit:
            found.append({"error": "no answer in time"})
            continue
        chosen = [request for request in rest[:batch] if request["at"] <= now]
        longest = max(len(request["ids"]) for request in chosen)
        rows = [[0] * (longest - len(request["ids"])) + request["ids"] for request in chosen]
        mask = [[int(at >= longest - len(r["ids"])) for at in range(longest)] for r in chosen]
        times: list[float] = []

        def note(ids: torch.Tensor, scores: Any, times: list[float] = times) -> torch.Tensor:
            times.append(time.perf_counter() - began)
            return torch.zeros(len(ids), dtype=torch.bool)

        model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            pad_token_id=0,
            max_new_tokens=max(request["tokens"] for request in chosen),
            do_sample=False,
            stopping_criteria=[note],
        )
        for request in chosen:
            last = times[request["tokens"] - 1] - request["at"]
            first = times[0] - request["at"]
            found.append({"first": first, "last": last, "tokens": request["tokens"]})
    return found


def main(place: str) -> None:
    if not place.endswith(".json"):
        GPT2LMHeadModel(GPT2Config()).save_pretrained(place)
        return
    asked = json.loads(Path(place).read_text())
    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    # As many tokens each time, whatever they are.
    model.generation_config.eos_token_id = None
    model.to(fastest_dtype(model, asked["batch"]))
    print(json.dumps(answer(model, asked["batch"], asked["requests"], asked["seconds"])))


if __name__ == "__main__":
    main(sys.argv[1])
