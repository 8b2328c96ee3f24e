"""Two ranks that run requests of which some fail on one rank or on both; started by test_faults.py.

A prompt "PLACE RANKS" fails there: in `encode`, at the cache's start or `select`, or in a step, on
the ranks that are named. Rank 0 prints the outcome of each as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oneflow_accel import distributed, watchdog
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from pipeline_fakes import CycleModel, write_vocabulary

from libai_projects.inference.command import run_and_wait
from libai_projects.inference.jobs import Job, Worker
from libai_projects.inference.text_pipeline import TextPipeline
from libai_projects.inference.texts import Piece
from libai_projects.text.tokenizer import GPT2Tokenizer


class Faults:
    def __init__(self) -> None:
        self.place = ""

    def read(self, prompt: str) -> None:
        place, _, ranks = prompt.partition(" ")
        self.place = place if str(distributed.rank()) in ranks else ""

    def check(self, place: str) -> None:
        if place == self.place:
            raise UserError("a file is missing") if place == "encode" else MemoryError(place)


class FaultyModel(CycleModel):
    """Steps are collective, as those of a model that is shared out; they start to fail late."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def new_cache(self, pages: int | None = None) -> SimpleNamespace:
        self._faults.check("start")
        cache = super().new_cache(pages)
        select = cache.pages.select

        def faulty(numbers: list[int], rows: np.ndarray) -> list[int]:
            self._faults.check("select")
            return select(numbers, rows)

        cache.pages.select = faulty
        return cache

    def _logits(self, positions: np.ndarray) -> np.ndarray:
        if self.steps % 3 == 2:
            self._faults.check("step")
        flow.comm.barrier()
        return super()._logits(positions)


class FaultyTokenizer(GPT2Tokenizer):
    faults: Faults

    def encode(self, text: str) -> list[int]:
        self.faults.read(text)
        self.faults.check("encode")
        return super().encode(text)


def ask_all(worker: Worker, prompts: list[str]) -> None:
    for prompt in prompts:
        options = {"num_beams": 2, "max_new_tokens": 4}
        on_text = None
        if prompt.startswith("text"):
            options = {"max_new_tokens": 4}

            def on_text(_piece: Piece) -> None:
                raise MemoryError("text")

        elif "clock" in prompt:
            options["max_time"] = 60.0
        try:
            found: Any = [
                each.text for each in run_and_wait(worker, Job([prompt], options, on_text))
            ]
        except UserError as error:
            found = str(error)
        # One write: what rank 1 prints must not come between the text and its line end.
        print(json.dumps([prompt, found]) + "\n", end="", flush=True)


def main(prompts: list[str]) -> None:
    faults = Faults()
    # Rank 1 has a fault of its own where only its copy of a file is damaged.
    FaultyTokenizer.faults = faults
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = FaultyTokenizer(*write_vocabulary(Path(folder)))
    worker = Worker(TextPipeline(FaultyModel(faults), tokenizer))
    with watchdog.guard():
        if distributed.is_main():

            def read() -> None:
                ask_all(worker, prompts)
                worker.close(finish=True)

            threading.Thread(target=read, daemon=True).start()
        worker.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
