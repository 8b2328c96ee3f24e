"""transformers' `generate` for benchmarks.serving, without a server.

    python -m benchmarks.peers.serving FOLDER       writes a model of GPT-2 small's shape
    python -m benchmarks.peers.serving FILE.json    prints a line of JSON: an Answer to each request

FILE has the folder of a `model`, `batch`, `threads` and `requests`.
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


def answers(model: Any, batch: int, requests: list[dict[str, Any]]) -> list[Any]:
    """Those that have arrived when a batch is done make the next one, which is as long as its
    longest."""
    found: list[Any] = []
    began = time.perf_counter()
    while rest := requests[len(found) :]:
        time.sleep(max(0.0, began + rest[0]["at"] - time.perf_counter()))
        now = time.perf_counter() - began
        chosen = [request for request in rest[:batch] if request["at"] <= now]
        longest = max(len(request["ids"]) for request in chosen)
        # Filled up on the left.
        rows = [[0] * (longest - len(each["ids"])) + each["ids"] for each in chosen]
        seen = torch.arange(longest) >= longest - torch.tensor([[len(r["ids"])] for r in chosen])
        times: list[float] = []

        def note(ids: torch.Tensor, _: Any, times: list[float] = times) -> torch.Tensor:
            times.append(time.perf_counter() - began)
            return torch.zeros(len(ids), dtype=torch.bool)

        model.generate(
            torch.tensor(rows),
            attention_mask=seen.long(),
            pad_token_id=0,
            max_new_tokens=max(request["tokens"] for request in chosen),
            do_sample=False,
            stopping_criteria=[note],
        )
        for at, count in ((request["at"], request["tokens"]) for request in chosen):
            found.append((times[0] - at, times[count - 1] - at, count))
    return found


def main(place: str) -> None:
    if not place.endswith(".json"):
        GPT2LMHeadModel(GPT2Config()).save_pretrained(place)
        return
    asked = json.loads(Path(place).read_text())
    torch.set_num_threads(asked.pop("threads"))
    model = AutoModelForCausalLM.from_pretrained(asked.pop("model"), dtype=torch.float32).eval()
    # As many tokens each time, whatever they are.
    model.generation_config.eos_token_id = None
    model.to(fastest_dtype(model, asked["batch"]))
    print(json.dumps(answers(model, **asked)))


if __name__ == "__main__":
    main(sys.argv[1])
