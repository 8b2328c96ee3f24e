"""Our side: `python -m benchmarks.ours.side`, started by side_by_side.py.

With nothing but `import oneflow_accel`, as the READMEs have it.
"""

from __future__ import annotations

import oneflow_accel  # noqa: F401

import oneflow as flow

from benchmarks import small
from benchmarks.ours import generation, models, monarch, operators, optimizers, vitae
from benchmarks.serve import serve


def main() -> None:
    flow.manual_seed(0)
    modules = (operators, optimizers, models, generation, monarch, vitae)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    serve(
        makers | small.makers(flow),
        f"oneflow {flow.__version__}",
        flow._oneflow_internal.eager.Sync,
    )


if __name__ == "__main__":
    main()
