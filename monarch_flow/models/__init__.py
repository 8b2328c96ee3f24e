"""Vision models whose linear layers are chosen by config."""

from monarch_flow.models.mixer import MlpMixer
from monarch_flow.models.registry import create_model, default_config, list_models
from monarch_flow.models.vit import VisionTransformer

__all__ = [
    "MlpMixer",
    "VisionTransformer",
    "create_model",
    "default_config",
    "list_models",
]
