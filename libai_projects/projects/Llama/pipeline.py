r"""Continues prompts with a Llama, on one process or on several.

    python projects/Llama/pipeline.py --model DIR --prompt "Once upon a time"
    python3 -m oneflow.distributed.launch --nproc_per_node 4 projects/Llama/pipeline.py --model DIR

`python3 projects/Llama/pipeline.py --help` lists every option with its default.
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

CONFIG_FILE = str(Path(__file__).resolve().parent / "configs" / "llama_inference.py")
EXAMPLES = ("Once upon a time", "The capital of France is", "a cute pig")


def main(argv: Sequence[str]) -> int:
    return command.main(argv, CONFIG_FILE, EXAMPLES)


if __name__ == "__main__":
    command.leave(run("pipeline.py", lambda: main(sys.argv[1:])))
