"""Linear layers with structured matrices, and what chooses and places them.

    from monarch_flow.layers import MonarchLinear
"""

# Every layer registers itself for LinearConfig when it is imported.
from monarch_flow.layers.config import LinearConfig, LinearLike, register_linear
from monarch_flow.layers.mlp import Mlp, MlpCustom, build_mlp, dropout
from monarch_flow.layers.monarch import MonarchLinear, monarch_shapes
from monarch_flow.layers.structured import InitFunction, StructuredLinear

__all__ = [
    "InitFunction",
    "LinearConfig",
    "LinearLike",
    "Mlp",
    "MlpCustom",
    "MonarchLinear",
    "StructuredLinear",
    "build_mlp",
    "dropout",
    "monarch_shapes",
    "register_linear",
]
