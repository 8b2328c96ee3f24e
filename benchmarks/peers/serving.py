"""transformers' `generate` for benchmarks.serving, in batches: FILE of `python -m
benchmarks.peers.serving FILE` is JSON; an Answer to each request is printed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.models import fastest_dtype


def main(folder: str, clients: int, threads: int, requests: list[tuple[float, str, int]]) -> None:
    """Those (at, prompt, tokens) that have arrived when a batch is done make the next one."""
    torch.set_num_threads(threads)
    words = AutoTokenizer.from_pretrained(folder, padding_side="left", pad_token="<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.to(fastest_dtype(model, clients))
    # As many tokens each time, whatever they are.
    model.generation_config.eos_token_id = None
    answers: list[tuple[float, float, int]] = []
    began = time.perf_counter()
    while rest := requests[len(answers) :]:
        time.sleep(max(0.0, began + rest[0][0] - time.perf_counter()))
        now = time.perf_counter() - began
        chosen = [request for request in rest[:clients] if request[0] <= now]
        batch = words([prompt for _, prompt, _ in chosen], padding=True, return_tensors="pt")
        times: list[float] = []

        def note(ids: torch.Tensor, _: object, times: list[float] = times) -> torch.Tensor:
            times.append(time.perf_counter() - began)
            return torch.zeros(len(ids), dtype=torch.bool)

        longest = max(tokens for *_, tokens in chosen)
        model.generate(**batch, max_new_tokens=longest, do_sample=False, stopping_criteria=[note])
        answers += [(times[0] - at, times[n - 1] - at, n) for at, _, n in chosen]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(**json.loads(Path(sys.argv[1]).read_text()))
