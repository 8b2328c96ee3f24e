"""A peer's side: `.venv-peer/bin/python -m benchmarks.peers.side THREADS PEER`, started by
side_by_side.py; PEER is one of those of items.py."""

from __future__ import annotations

import importlib.metadata
import sys

import torch

from benchmarks.both import Both
from benchmarks.peers import engines, models, monarch, operators, vitae
from benchmarks.serve import serve


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    Both.peer = peer = sys.argv[2]
    modules = (operators, models, monarch, vitae)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    version = f"torch {torch.__version__}"
    if peer in engines.MAKERS:
        package = peer.lower().replace(" ", "")
        version += f", {package} {importlib.metadata.version(package)}"
    serve(makers, version)


if __name__ == "__main__":
    main()
