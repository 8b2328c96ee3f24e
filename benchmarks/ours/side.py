"""Our side: `python -m benchmarks.ours.side`, started by side_by_side.py.

With nothing but `import oneflow_accel`, as the READMEs have it.
"""

from __future__ import annotations

from typing import Any

from oneflow_accel import precision

import oneflow as flow

from benchmarks.both import Both
from benchmarks.ours import generation, models, operators
from benchmarks.serve import Maker, Step, serve


def _in_its_precision(maker: Maker) -> Maker:
    """With a loss's products in the item's precision, too, as our trainers have them."""

    def make(**params: Any) -> Step:
        precision.set_products(Both.current.precision)
        return maker(**params)

    return make


def main() -> None:
    flow.manual_seed(0)
    modules = (operators, models, generation)
    makers = {kind: maker for module in modules for kind, maker in module.MAKERS.items()}
    serve(
        {kind: _in_its_precision(maker) for kind, maker in makers.items()},
        f"oneflow {flow.__version__}",
        flow._oneflow_internal.eager.Sync,
    )


if __name__ == "__main__":
    main()
