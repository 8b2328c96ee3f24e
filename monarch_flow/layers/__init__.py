"""Linear layers and convolutions with structured matrices, and what chooses and places them.

    from monarch_flow.layers import MonarchLinear

monarch_flow/docs/layers.md lists them.
"""

# Every layer registers itself for LinearConfig when it is imported.
from monarch_flow.layers.block_sparse import BlockSparseLinear, MaskedLinear
from monarch_flow.layers.butterfly import ButterflyLinear, KaleidoscopeLinear
from monarch_flow.layers.config import LinearConfig, LinearLike, register_linear, replace_linears
from monarch_flow.layers.convolution import MonarchConv2d
from monarch_flow.layers.drop import Dropout, DropPath, dropout
from monarch_flow.layers.low_rank import LowRank, SparseLRLinear
from monarch_flow.layers.mlp import Mlp, MlpLike, build_mlp, mlp_options
from monarch_flow.layers.monarch import (
    BlockdiagLinear,
    MonarchLinear,
    monarch_shapes,
    numbers_inside,
    parameter_shapes,
)
from monarch_flow.layers.structured import StructuredLinear

__all__ = [
    "BlockSparseLinear",
    "BlockdiagLinear",
    "ButterflyLinear",
    "DropPath",
    "Dropout",
    "KaleidoscopeLinear",
    "LinearConfig",
    "LinearLike",
    "LowRank",
    "MaskedLinear",
    "Mlp",
    "MlpLike",
    "MonarchConv2d",
    "MonarchLinear",
    "SparseLRLinear",
    "StructuredLinear",
    "build_mlp",
    "dropout",
    "mlp_options",
    "monarch_shapes",
    "numbers_inside",
    "parameter_shapes",
    "register_linear",
    "replace_linears",
]
