"""Our side: `python -m benchmarks.ours.side`, started by side_by_side.py."""

from __future__ import annotations

import oneflow_accel

import oneflow as flow

from benchmarks.ours import generation, models, monarch_vit, operators, optimizers
from benchmarks.serve import serve


def main() -> None:
    backend = oneflow_accel.select_device()
    backend.manual_seed(0)
    makers = {
        **operators.MAKERS,
        **optimizers.MAKERS,
        **models.MAKERS,
        **generation.MAKERS,
        **monarch_vit.MAKERS,
    }
    serve(makers, f"oneflow {flow.__version__}", backend.synchronize)


if __name__ == "__main__":
    main()
