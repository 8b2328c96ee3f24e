"""A peer's side: `.venv-peer/bin/python -m benchmarks.peers.side THREADS PEER`, started by
side_by_side.py; PEER is one of those of items.py."""

from __future__ import annotations

import importlib.metadata
import sys

import torch

from benchmarks.both import Both
from benchmarks.items import LLAMA_CPP, ONNX_RUNTIME, OPENVINO
from benchmarks.peers import models, monarch, operators, vitae
from benchmarks.serve import serve

PACKAGES = {OPENVINO: "openvino", ONNX_RUNTIME: "onnxruntime", LLAMA_CPP: "llama-cpp-python"}


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    Both.peer = peer = sys.argv[2]
    modules = (operators, models, monarch, vitae)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    version = f"torch {torch.__version__}"
    if peer in PACKAGES:
        version += f", {PACKAGES[peer]} {importlib.metadata.version(PACKAGES[peer])}"
    serve(makers, version)


if __name__ == "__main__":
    main()
