"""Our side: `python -m benchmarks.ours.side`, started by side_by_side.py."""

from __future__ import annotations

import oneflow_accel

import oneflow as flow

from benchmarks.ours import generation, models, monarch, operators, optimizers, vitae
from benchmarks.serve import serve


def main() -> None:
    backend = oneflow_accel.select_device()
    backend.manual_seed(0)
    modules = (operators, optimizers, models, generation, monarch, vitae)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    serve(makers, f"oneflow {flow.__version__}", backend.synchronize)


if __name__ == "__main__":
    main()
