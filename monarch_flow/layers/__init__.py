"""Linear layers with structured matrices, and what chooses and places them.

    from monarch_flow.layers import MonarchLinear

The README of monarch_flow lists them.
"""

# Every layer registers itself for LinearConfig when it is imported.
from monarch_flow.layers.block_sparse import BlockSparseLinear, MaskedLinear
from monarch_flow.layers.blockdiag import BlockdiagLinear
from monarch_flow.layers.config import LinearConfig, LinearLike, register_linear
from monarch_flow.layers.drop_elements import Dropout, dropout
from monarch_flow.layers.drop_path import DropPath
from monarch_flow.layers.low_rank import LowRank, low_rank_factors
from monarch_flow.layers.mlp import Mlp, MlpCustom, build_mlp
from monarch_flow.layers.monarch import MonarchLinear, monarch_shapes
from monarch_flow.layers.replace import replace_linears
from monarch_flow.layers.sparse_low_rank import SparseLRLinear
from monarch_flow.layers.sparsity import (
    BlockdiagSparsityConfig,
    ButterflyGlobalSparsityConfig,
    FlatBlockButterflySparsityConfig,
    NinjaTurtleSparsityConfig,
    SparsityConfig,
)
from monarch_flow.layers.structured import InitFunction, StructuredLinear

__all__ = [
    "BlockSparseLinear",
    "BlockdiagLinear",
    "BlockdiagSparsityConfig",
    "ButterflyGlobalSparsityConfig",
    "DropPath",
    "Dropout",
    "FlatBlockButterflySparsityConfig",
    "InitFunction",
    "LinearConfig",
    "LinearLike",
    "LowRank",
    "MaskedLinear",
    "Mlp",
    "MlpCustom",
    "MonarchLinear",
    "NinjaTurtleSparsityConfig",
    "SparseLRLinear",
    "SparsityConfig",
    "StructuredLinear",
    "build_mlp",
    "dropout",
    "low_rank_factors",
    "monarch_shapes",
    "register_linear",
    "replace_linears",
]
