"""Trains or evaluates a vision model with dense or structured layers.

    python -m monarch_flow.train experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp \
        datamodule.data_dir=DIR
    python -m oneflow.distributed.launch --nproc_per_node 4 -m monarch_flow.train experiment=...

`python -m monarch_flow.train --help` lists flags, groups with their options, and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    from monarch_flow.command import Command
    from monarch_flow.engine.run import run
except ImportError as error:
    sys.exit(
        f"{error}. monarch_flow.train runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )

COMMAND = Command("monarch_flow.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code."""
    return COMMAND.main(argv, run)


if __name__ == "__main__":
    sys.exit(main())
