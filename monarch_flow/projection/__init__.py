"""Dense weights to structured ones and back: arrays, modules, models, files, training states.

    from monarch_flow.projection import project_to_monarch, monarch_to_dense   # numpy arrays
    from monarch_flow.projection import project_model, densify_model           # modules, in place
    from monarch_flow.projection import densify_training_state                 # checkpoint's arrays

For files: `python -m monarch_flow.convert`.
"""

from monarch_flow.projection.elementwise import (
    block_sparse_to_dense,
    blockdiag_to_dense,
    project_to_block_sparse,
    project_to_blockdiag,
)
from monarch_flow.projection.layer_specs import find_layers, spec_of_module, structured_layers
from monarch_flow.projection.low_rank import low_rank_to_dense, project_to_low_rank
from monarch_flow.projection.modules import (
    densify_model,
    densify_module,
    project_model,
    project_module,
)
from monarch_flow.projection.monarch import (
    best_error,
    monarch_to_dense,
    project_to_factors,
    project_to_monarch,
    project_to_monarch_rank,
)
from monarch_flow.projection.report import LayerReport, format_table, total_relative_error
from monarch_flow.projection.structure import LayerSpec
from monarch_flow.projection.training_state import (
    TrainingState,
    densify_training_state,
    project_training_state,
)
from monarch_flow.projection.weights import densify_weights, project_weights

__all__ = [
    "LayerReport",
    "LayerSpec",
    "TrainingState",
    "best_error",
    "block_sparse_to_dense",
    "blockdiag_to_dense",
    "densify_model",
    "densify_module",
    "densify_training_state",
    "densify_weights",
    "find_layers",
    "format_table",
    "low_rank_to_dense",
    "monarch_to_dense",
    "project_model",
    "project_module",
    "project_to_block_sparse",
    "project_to_blockdiag",
    "project_to_factors",
    "project_to_low_rank",
    "project_to_monarch",
    "project_to_monarch_rank",
    "project_training_state",
    "project_weights",
    "spec_of_module",
    "structured_layers",
    "total_relative_error",
]
