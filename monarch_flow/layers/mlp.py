"""The two-layer perceptron of transformers, dense or with structured layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers.config import (
    TARGET,
    LinearConfig,
    LinearLike,
    fill_options,
    names_linear,
    split_target,
)
from monarch_flow.layers.drop import dropout

# A mapping that names _TARGET_NAME, or a linear layer, by it or its short name, for both; None for
# dense.
MlpLike = Mapping[str, Any] | str | None
# What the papers' code calls `Mlp`.
_TARGET_NAME = "MlpCustom"


@bfloat16_container
class Mlp(nn.Module):
    """`fc1`, an exact GELU and `fc2`, with dropout after the last two: (..., width) to the same.

    `LinearConfig.of` reads the configs; `drop_btw_fcs` says whether there is dropout after the GELU
    too. Raises UserError where a config is wrong.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        linear1_cfg: LinearLike = None,
        linear2_cfg: LinearLike = None,
        drop: float = 0.0,
        drop_btw_fcs: bool = True,
    ) -> None:
        super().__init__()
        self.fc1 = LinearConfig.of(linear1_cfg).build(width, hidden)
        self.act = nn.GELU()
        self.drop1 = dropout(drop if drop_btw_fcs else 0.0)
        self.fc2 = LinearConfig.of(linear2_cfg).build(hidden, width)
        self.drop2 = dropout(drop)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


def build_mlp(mlp_cfg: MlpLike, width: int, hidden: int, *, drop: float = 0.0) -> Mlp:
    """The perceptron that a model's `mlp_cfg` asks for.

    `mlp_cfg` is None for dense layers, the config of a linear layer for both, or {"_target_":
    "monarch_flow.layers.MlpCustom", "linear1_cfg": ..., "linear2_cfg": ..., ...}; the model's
    `drop` goes before one in it. UserError names the nearest for an unknown class or key.
    """
    return Mlp(width, hidden, **{**mlp_options(mlp_cfg), "drop": drop})


def mlp_options(mlp_cfg: MlpLike) -> dict[str, Any]:
    """What `mlp_cfg` says of `Mlp`'s arguments: linear1_cfg and linear2_cfg in any case. UserError
    as `build_mlp`."""
    if mlp_cfg is None or isinstance(mlp_cfg, str):
        return {"linear1_cfg": mlp_cfg, "linear2_cfg": mlp_cfg}
    if not isinstance(mlp_cfg, Mapping):
        raise UserError(f"mlp_cfg is {mlp_cfg!r}: give null, a name or a mapping with '{TARGET}'")
    if names_linear(mlp_cfg):
        return {"linear1_cfg": mlp_cfg, "linear2_cfg": mlp_cfg}
    _, options = split_target(mlp_cfg, {_TARGET_NAME: Mlp}, "MLP")
    return fill_options(options, Mlp, ("width", "hidden"), _TARGET_NAME)
