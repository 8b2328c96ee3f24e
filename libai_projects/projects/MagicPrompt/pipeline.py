r"""Continues prompts with a GPT-2, on one process or on several.

    python3 -m oneflow.distributed.launch projects/MagicPrompt/pipeline.py --prompt "a cute pig"
    python3 -m oneflow.distributed.launch --nproc_per_node 4 projects/MagicPrompt/pipeline.py

`python3 projects/MagicPrompt/pipeline.py --help` lists every option with its default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # The launcher puts this script's folder first, which is not where the packages are.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

try:
    import oneflow_accel  # noqa: F401 - before oneflow

    import libai_projects  # noqa: F401 - says how to install libai
except ImportError as error:
    sys.exit(
        f"{error}. pipeline.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )
from oneflow_accel.command import run

from libai_projects.inference import command
from libai_projects.inference.pipeline import TextGenerationPipeline

__all__ = ["CONFIG_FILE", "EXAMPLES", "MagicPromptPipeline", "TextGenerationPipeline", "main"]

CONFIG_FILE = str(Path(__file__).resolve().parent / "configs" / "gpt2_inference.py")
EXAMPLES = ("a dog", "a cute pig", "a cute girl")

MagicPromptPipeline = TextGenerationPipeline


def main(argv: Sequence[str]) -> int:
    return command.main(argv, CONFIG_FILE, EXAMPLES)


if __name__ == "__main__":
    command.leave(run("pipeline.py", lambda: main(sys.argv[1:])))
