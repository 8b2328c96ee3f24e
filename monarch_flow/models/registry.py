"""The models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from oneflow_accel.errors import UserError

from monarch_flow.layers import LinearConfig
from monarch_flow.layers.targets import TARGET, choices
from monarch_flow.models.blocks import Size
from monarch_flow.models.classifier import Classifier
from monarch_flow.models.mixer import MlpMixer
from monarch_flow.models.t2t_vit import T2TViT
from monarch_flow.models.vit import VisionTransformer
from monarch_flow.models.vitae import ViTAE
from monarch_flow.models.vitae_patch import PatchViTAE


@dataclass(frozen=True)
class Entry:
    """A named model: the class, the arguments that differ from its defaults, and one line on what
    it is and where it comes from."""

    build: Callable[..., Classifier]
    config: Mapping[str, Any] = field(default_factory=dict)
    doc: str = ""


def _vit(doc: str, **config: Any) -> Entry:
    return Entry(VisionTransformer, config, doc)


def _small_vit(doc: str, **config: Any) -> Entry:
    """A ViT that a CPU trains in minutes."""
    return _vit(
        doc,
        **{"embed_dim": 128, "depth": 4, "num_heads": 4, "mlp_ratio": 4.0, "norm_eps": 1e-5}
        | config,
    )


def _t2t(doc: str, **config: Any) -> Entry:
    return Entry(T2TViT, config, doc)


def _vitae(doc: str, **config: Any) -> Entry:
    return Entry(ViTAE, config, doc)


_MODELS: dict[str, Entry] = {
    "vit_small_patch16_224": _vit(
        "ViT-S/16 of the Monarch paper and fly: 768 wide, 8 blocks, layer norms with an epsilon of "
        "1e-5; timm's model of this name is deit_small_patch16_224 here",
        depth=8,
        num_heads=8,
        mlp_ratio=3.0,
        qkv_bias=False,
        norm_eps=1e-5,
    ),
    "deit_tiny_patch16_224": _vit(
        "DeiT-Ti (Touvron et al. 2021, table 1), which timm also calls vit_tiny_patch16_224",
        embed_dim=192,
        num_heads=3,
    ),
    "deit_base_patch16_224": _vit(
        "DeiT-B (Touvron et al. 2021, table 1): the layers of vit_base_patch16_224"
    ),
    "deit_small_patch16_224": _vit(
        "DeiT-S (Touvron et al. 2021, table 1), which timm also calls vit_small_patch16_224",
        embed_dim=384,
        num_heads=6,
    ),
    "vit_base_patch16_224": _vit("ViT-B/16 (Dosovitskiy et al. 2021, table 1)"),
    "vit_large_patch16_224": _vit(
        "ViT-L/16 (Dosovitskiy et al. 2021, table 1)", embed_dim=1024, depth=24, num_heads=16
    ),
    "vit_tiny_patch4_28": _small_vit(
        "for MNIST: 49 patches", patch_size=4, img_size=28, in_chans=1, num_classes=10
    ),
    "vit_tiny_patch8_64": _small_vit(
        "for small photos: 64 patches", patch_size=8, img_size=64, num_classes=5
    ),
    "mixer_s16_224": Entry(
        MlpMixer, {"embed_dim": 512, "depth": 8}, "Mixer-S/16 (Tolstikhin et al. 2021, table 1)"
    ),
    "mixer_b16_224": Entry(
        MlpMixer, {"embed_dim": 768, "depth": 12}, "Mixer-B/16 (Tolstikhin et al. 2021, table 1)"
    ),
    "t2t_vit_7": _t2t(
        "T2T-ViT-7 (Yuan et al. 2021, table 2), with performers",
        embed_dim=256,
        depth=7,
        num_heads=4,
        mlp_ratio=2.0,
    ),
    "t2t_vit_14": _t2t("T2T-ViT-14 (Yuan et al. 2021, table 2), with performers"),
    "t2t_vit_t_14": _t2t(
        "T2T-ViT_t-14 (Yuan et al. 2021, table 2), with transformers", tokens_type="transformer"
    ),
    "ViTAE_basic_Tiny": _vitae("ViTAE-T (Xu et al. 2021, table 1)"),
    "ViTAE_basic_6M": _vitae("ViTAE-6M (Xu et al. 2021, table 1)", depth=10),
    "ViTAE_basic_13M": _vitae(
        "ViTAE-13M as released: 10.8 million parameters (Xu et al. 2021, table 1, says 13.2)",
        embed_dims=(64, 64, 160),
        token_dims=(64, 64, 320),
        depth=11,
        num_heads=5,
    ),
    "ViTAE_basic_Small": _vitae(
        "ViTAE-S (Xu et al. 2021, table 1)",
        embed_dims=(64, 64, 192),
        token_dims=(96, 192, 384),
        depth=14,
        num_heads=6,
        mlp_ratio=3.0,
        conv_groups=96,
    ),
    "ViTAE_basic_Base": Entry(PatchViTAE, {}, "ViTAE-B (Zhang et al. 2022)"),
    "ViTAE_basic_Large": Entry(
        PatchViTAE,
        {"embed_dim": 1024, "depth": 24, "num_heads": 16, "conv_groups": 256},
        "ViTAE-L (Zhang et al. 2022)",
    ),
    "ViTAE_basic_Huge": Entry(
        PatchViTAE,
        {"embed_dim": 1280, "depth": 32, "num_heads": 16, "conv_groups": 320},
        "ViTAE-H (Zhang et al. 2022)",
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


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    img_size: Size | None = None,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    mlp_cfg: str | Mapping[str, Any] | None = None,
    attnlinear_cfg: str | Mapping[str, Any] | None = None,
    **more: Any,
) -> Classifier:
    """A freshly initialized model, on the CPU, in float32; None means the model's default.

    Args:
        drop_path_rate: stochastic depth: of the last block in a transformer, of all in a Mixer.
        mlp_cfg: layers of the MLPs, over channels in a Mixer: a mapping as `build_mlp` takes it, or
            the short name of a linear layer, for both; None for dense.
        attnlinear_cfg: layers of the projections to query, key and value; None for dense.
        more: other arguments of the model's class; `default_config(name)` lists them.

    Returns:
        A module that maps images (N, in_chans, *img_size) to scores (N, num_classes), with
        `features(images)` (N, num_features) before the head.

    Raises:
        UserError: an unknown model or argument (the text names the nearest), or values that do not
            go together.
    """
    entry = _entry(name)
    arguments: dict[str, Any] = {
        **entry.config,
        "drop_rate": drop_rate,
        "drop_path_rate": drop_path_rate,
        **more,
    }
    optional = {
        "num_classes": num_classes,
        "img_size": img_size,
        "mlp_cfg": None if mlp_cfg is None else _mlp_mapping(mlp_cfg),
        "attnlinear_cfg": attnlinear_cfg,
    }
    arguments |= {key: value for key, value in optional.items() if value is not None}
    known = default_config(name)
    for key in arguments:
        if key not in known:
            raise UserError(f"{name} has no argument '{key}'; {choices(key, known)}")
    return entry.build(**arguments)


def _entry(name: str) -> Entry:
    if name not in _MODELS:
        raise UserError(f"there is no model '{name}'; {choices(name, _MODELS)}")
    return _MODELS[name]


def _mlp_mapping(mlp_cfg: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A linear layer's short name as a mapping that names it for both layers of an MLP."""
    if not isinstance(mlp_cfg, str):
        return mlp_cfg
    layer = LinearConfig.of(mlp_cfg).to_dict()
    return {TARGET: "monarch_flow.layers.MlpCustom", "linear1_cfg": layer, "linear2_cfg": layer}
