"""The peers' side: `.venv-peer/bin/python -m benchmarks.peers.side THREADS`, started by
side_by_side.py."""

from __future__ import annotations

import sys

import torch

from benchmarks.peers import models, monarch, operators, vitae
from benchmarks.serve import serve


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    modules = (operators, models, monarch, vitae)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    serve(makers | operators.BOTH.makers(), f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
