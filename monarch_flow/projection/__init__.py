"""Dense weights to structured ones and back: arrays, modules, models, files, training states.

    from monarch_flow.projection import project_to_monarch, monarch_to_dense   # numpy arrays
    from monarch_flow.projection import project_model, densify_model           # modules, in place
    from monarch_flow.projection import densify_training_state                 # checkpoint's arrays
    from monarch_flow.projection import transforms        # DFT, DCT, ... as layers of factors

For files: `python -m monarch_flow.convert`.
"""

from monarch_flow.projection.matrices import monarch_to_dense, project_to_monarch
from monarch_flow.projection.modules import densify_model, project_model
from monarch_flow.projection.state_dicts import densify_training_state, densify_weights
from monarch_flow.projection.structures import LayerSpec, structured_layers

__all__ = [
    "LayerSpec",
    "densify_model",
    "densify_training_state",
    "densify_weights",
    "monarch_to_dense",
    "project_model",
    "project_to_monarch",
    "structured_layers",
]
