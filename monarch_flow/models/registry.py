"""The models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from oneflow_accel.errors import UserError

from monarch_flow.layers.config import choices
from monarch_flow.models.blocks import Classifier
from monarch_flow.models.mixer import MlpMixer
from monarch_flow.models.t2t_vit import T2TViT
from monarch_flow.models.vit import VisionTransformer
from monarch_flow.models.vitae import PatchViTAE, ViTAE


@dataclass(frozen=True)
class Entry:
    """A named model: the class, one line on what it is and where it comes from, and the arguments
    that differ from the class's defaults."""

    build: Callable[..., Classifier]
    doc: str
    config: Mapping[str, Any] = field(default_factory=dict)


# A ViT that a CPU trains in minutes.
_SMALL = {"embed_dim": 128, "depth": 4, "num_heads": 4, "norm_eps": 1e-5}

_MODELS: dict[str, Entry] = {
    "vit_small_patch16_224": Entry(
        VisionTransformer,
        "ViT-S/16 of the Monarch paper and fly: 768 wide, 8 blocks, layer norms with an epsilon of "
        "1e-5; timm's model of this name is deit_small_patch16_224 here",
        {"depth": 8, "num_heads": 8, "mlp_ratio": 3.0, "qkv_bias": False, "norm_eps": 1e-5},
    ),
    "deit_tiny_patch16_224": Entry(
        VisionTransformer,
        "DeiT-Ti (Touvron et al. 2021, table 1), which timm also calls vit_tiny_patch16_224",
        {"embed_dim": 192, "num_heads": 3},
    ),
    "deit_base_patch16_224": Entry(
        VisionTransformer,
        "DeiT-B (Touvron et al. 2021, table 1): the layers of vit_base_patch16_224",
    ),
    "deit_small_patch16_224": Entry(
        VisionTransformer,
        "DeiT-S (Touvron et al. 2021, table 1), which timm also calls vit_small_patch16_224",
        {"embed_dim": 384, "num_heads": 6},
    ),
    "vit_base_patch16_224": Entry(VisionTransformer, "ViT-B/16 (Dosovitskiy et al. 2021, table 1)"),
    "vit_large_patch16_224": Entry(
        VisionTransformer,
        "ViT-L/16 (Dosovitskiy et al. 2021, table 1)",
        {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    ),
    "vit_tiny_patch4_28": Entry(
        VisionTransformer,
        "for MNIST: 49 patches",
        {**_SMALL, "patch_size": 4, "img_size": 28, "in_chans": 1, "num_classes": 10},
    ),
    "vit_tiny_patch8_64": Entry(
        VisionTransformer,
        "for small photos: 64 patches",
        {**_SMALL, "patch_size": 8, "img_size": 64, "num_classes": 5},
    ),
    "mixer_s16_224": Entry(MlpMixer, "Mixer-S/16 (Tolstikhin et al. 2021, table 1)"),
    "mixer_b16_224": Entry(
        MlpMixer,
        "Mixer-B/16 (Tolstikhin et al. 2021, table 1)",
        {"embed_dim": 768, "depth": 12},
    ),
    "t2t_vit_7": Entry(
        T2TViT,
        "T2T-ViT-7 (Yuan et al. 2021, table 2), with performers",
        {"embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
    ),
    "t2t_vit_14": Entry(T2TViT, "T2T-ViT-14 (Yuan et al. 2021, table 2), with performers"),
    "t2t_vit_t_14": Entry(
        T2TViT,
        "T2T-ViT_t-14 (Yuan et al. 2021, table 2), with transformers",
        {"tokens_type": "transformer"},
    ),
    "ViTAE_basic_Tiny": Entry(ViTAE, "ViTAE-T (Xu et al. 2021, table 1)"),
    "ViTAE_basic_6M": Entry(ViTAE, "ViTAE-6M (Xu et al. 2021, table 1)", {"depth": 10}),
    "ViTAE_basic_13M": Entry(
        ViTAE,
        "ViTAE-13M as released: 10.8 million parameters (Xu et al. 2021, table 1, says 13.2)",
        {"embed_dims": (64, 64, 160), "token_dims": (64, 64, 320), "depth": 11, "num_heads": 5},
    ),
    "ViTAE_basic_Small": Entry(
        ViTAE,
        "ViTAE-S (Xu et al. 2021, table 1)",
        {"embed_dims": (64, 64, 192), "token_dims": (96, 192, 384), "depth": 14, "num_heads": 6}
        | {"mlp_ratio": 3.0, "conv_groups": 96},
    ),
    "ViTAE_basic_Base": Entry(PatchViTAE, "ViTAE-B (Zhang et al. 2022)"),
    "ViTAE_basic_Large": Entry(
        PatchViTAE,
        "ViTAE-L (Zhang et al. 2022)",
        {"embed_dim": 1024, "depth": 24, "num_heads": 16, "conv_groups": 256},
    ),
    "ViTAE_basic_Huge": Entry(
        PatchViTAE,
        "ViTAE-H (Zhang et al. 2022)",
        {"embed_dim": 1280, "depth": 32, "num_heads": 16, "conv_groups": 320},
    ),
}


def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` accepts and `pattern` (* and ?, in any case) fits, sorted."""
    return [name for name in sorted(_MODELS) if fnmatch(name.lower(), pattern.lower())]


def describe_model(name: str) -> str:
    """One line on what a model is and where it comes from; UserError names the nearest model."""
    return _entry(name).doc


def default_config(name: str) -> dict[str, Any]:
    """All arguments of a model with their defaults; UserError names the nearest model."""
    entry = _entry(name)
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(entry.build).parameters.items()
    }
    return defaults | dict(entry.config)


def create_model(name: str, **arguments: Any) -> Classifier:
    """A freshly initialized model, on the CPU, in float32.

    Args:
        arguments: of the model's class, which `default_config(name)` lists; None means the default.
            All have num_classes, img_size, in_chans, drop_rate, drop_path_rate (stochastic depth:
            of the last block in a transformer, of all in a Mixer), and mlp_cfg, the layers of the
            MLPs (over channels in a Mixer) as `build_mlp` takes them; most have attnlinear_cfg,
            those of the projections to query, key and value, as `LinearConfig.of` takes them.

    Returns:
        A module that maps images (N, in_chans, *img_size) to scores (N, num_classes), with
        `features(images)` (N, num_features) before the head.

    Raises:
        UserError: an unknown model or argument (the text names the nearest), or values that do not
            go together.
    """
    known = default_config(name)
    given = {key: value for key, value in arguments.items() if value is not None}
    for key in given:
        if key not in known:
            raise UserError(f"{name} has no argument '{key}'; {choices(key, known)}")
    return _entry(name).build(**{**known, **given})


def _entry(name: str) -> Entry:
    if name not in _MODELS:
        raise UserError(f"there is no model '{name}'; {choices(name, _MODELS)}")
    return _MODELS[name]
