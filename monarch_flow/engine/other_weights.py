"""Weights that were saved elsewhere: under other names, for other classes, for other layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from oneflow_accel import layouts
from oneflow_accel.errors import UserError

import numpy as np
from oneflow import nn

from monarch_flow.models.published import is_published_t2t, t2t_names
from monarch_flow.projection import structured_layers

# The prefix of the classifier's weights in all our models.
_HEAD = "head."
# A ViT's patch embedding; its first axis is the model's width.
_PATCHES = "patch_embed.proj.weight"
_POSITIONS = "pos_embed.pe"

logger = logging.getLogger("oneflow_accel")


def with_our_names(arrays: Mapping[str, np.ndarray], model: nn.Module) -> dict[str, np.ndarray]:
    """Rename the weights of a published T2T-ViT, as `python -m monarch_flow.convert t2t` does."""
    if _POSITIONS in model.state_dict() and is_published_t2t(arrays):
        logger.info("the weights have the names of the published T2T-ViT; they are renamed")
        return t2t_names(arrays)
    return dict(arrays)


def with_new_head(arrays: Mapping[str, np.ndarray], model: nn.Module) -> dict[str, np.ndarray]:
    """Replace the head's weights by the model's own and log it; UserError where it has no head."""
    own = layouts.standard_state_dict(model)
    head = {name: value.numpy() for name, value in own.items() if name.startswith(_HEAD)}
    if not head:
        raise UserError(f"{type(model).__name__} has no {_HEAD}* to begin anew")
    dropped = [name for name in arrays if name.startswith(_HEAD)]
    for name in dropped:
        logger.info("%s %s is left out: the head begins anew", name, arrays[name].shape)
    return {name: array for name, array in arrays.items() if name not in dropped} | head


def hint(
    arrays: Mapping[str, np.ndarray], model: nn.Module, *, for_head: str, for_dense: str
) -> str:
    """Further lines of a message that say what to do where weights do not fit; "" if nothing helps.

    `for_head` is the advice for another number of classes, `for_dense` for dense weights and a
    structured model.
    """
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    layers = structured_layers(model)
    lines = []
    ours, theirs = own.get(f"{_HEAD}weight"), arrays.get(f"{_HEAD}weight")
    if ours is not None and theirs is not None and len(theirs) != ours[0]:
        lines.append(
            f"The weights are for {len(theirs)} classes and the data has {ours[0]}: {for_head}"
        )
    if for_dense and any(_is_dense(arrays, prefix) for prefix in layers):
        lines.append(f"The weights are dense: {for_dense}")
    if (own.get(_PATCHES, (0,))[0], len(arrays.get(_PATCHES, ()))) == (768, 384):
        lines.append(
            "The weights are 384 wide and the model 768, as two models of the name "
            "vit_small_patch16_224 are: timm's is deit_small_patch16_224 here, "
            "model/t2tmodel=deit_s_16"
        )
    structured = next((name for name in sorted(arrays) if _is_structured(name, arrays, own)), None)
    if structured is not None:
        lines.append(
            f"The weights are of structured layers ({structured}), and the model is dense there: "
            "choose them with model.mlp_cfg or model.attnlinear_cfg, or make the weights dense by "
            "python -m monarch_flow.convert densify"
        )
    return "".join(f"\n{line}" for line in lines)


def _is_dense(arrays: Mapping[str, np.ndarray], prefix: str) -> bool:
    weight = arrays.get(f"{prefix}.weight")
    return weight is not None and weight.ndim == 2


def _is_structured(
    name: str, arrays: Mapping[str, np.ndarray], own: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether an array belongs to a structured layer where the model has a dense one: by its name,
    or by more than two axes."""
    prefix, _, kind = name.rpartition(".")
    if kind == "bias" or len(own.get(f"{prefix}.weight", ())) != 2:
        return False
    return arrays[name].ndim != 2 if kind == "weight" else name not in own
