"""The peers' side: `.venv-peer/bin/python -m benchmarks.peers.side THREADS`, started by
side_by_side.py."""

from __future__ import annotations

import sys

import torch

from benchmarks.peers import models, monarch_vit, operators, optimizers
from benchmarks.serve import serve


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    makers = {
        **operators.MAKERS,
        **optimizers.MAKERS,
        **models.MAKERS,
        **monarch_vit.MAKERS,
    }
    serve(makers, f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
