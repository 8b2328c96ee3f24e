"""Generates with each of a JSON list of the pipeline's arguments; started by test_stages.py.

Rank 0 prints a line of JSON for each: how many layers it holds and the texts, or what was wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from pipeline_fakes import write_vocabulary

from libai_projects.projects.MagicPrompt import pipeline

# Weights far enough from 0 that the tokens differ.
MODEL = (
    "num_layers=5", "hidden_size=32", "ffn_hidden_size=64", "num_attention_heads=4",
    "max_seq_length=64", "initializer_range=0.2",
)  # fmt: skip


def texts(arguments: dict[str, Any], files: list[str]) -> list[Any]:
    made = pipeline.MagicPromptPipeline(
        pipeline.CONFIG_FILE,
        mode="random",
        vocab_file=files[0],
        merges_file=files[1],
        overrides=[f"model.cfg.{item}" for item in MODEL] + arguments.pop("overrides", []),
        **arguments,
    )
    found = [
        made(["a dog", "x"], max_new_tokens=12),
        made(["a dog", "x"], max_new_tokens=6, num_beams=2, num_return_sequences=2),
        made("a", max_new_tokens=12, do_sample=True, num_return_sequences=3, use_cache=False),
    ]
    return [len(made.model._layers), found]


def main(cases: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [str(path) for path in write_vocabulary(Path(folder))]
        for arguments in cases:
            try:
                found: Any = texts(arguments, files)
            except UserError as error:
                found = str(error)
            if distributed.is_main():
                print(json.dumps(["found", found]) + "\n", end="", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
