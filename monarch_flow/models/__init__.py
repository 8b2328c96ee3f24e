"""Vision models whose linear layers are chosen by config."""

from monarch_flow.models.classifier import Classifier
from monarch_flow.models.mixer import MlpMixer
from monarch_flow.models.registry import create_model, default_config, list_models
from monarch_flow.models.t2t_vit import T2TViT
from monarch_flow.models.vit import VisionTransformer
from monarch_flow.models.vitae import ViTAE
from monarch_flow.models.vitae_patch import PatchViTAE

__all__ = [
    "Classifier",
    "MlpMixer",
    "PatchViTAE",
    "T2TViT",
    "ViTAE",
    "VisionTransformer",
    "create_model",
    "default_config",
    "list_models",
]
