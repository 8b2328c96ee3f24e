"""Our side: `python -m benchmarks.ours.side`, started by side_by_side.py.

With nothing but `import oneflow_accel`, as the READMEs have it.
"""

from __future__ import annotations

import oneflow_accel  # noqa: F401

import oneflow as flow

from benchmarks.ours import generation, models, operators
from benchmarks.serve import serve


def main() -> None:
    flow.manual_seed(0)
    modules = (operators, models, generation)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    serve(
        makers | operators.BOTH.makers(),
        f"oneflow {flow.__version__}",
        flow._oneflow_internal.eager.Sync,
    )


if __name__ == "__main__":
    main()
