"""The normal cell of ViTAE (Xu et al. 2021, section 3): a transformer block with convolutions
beside its attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearLike, build_mlp
from monarch_flow.models.attention import Attention
from monarch_flow.models.blocks import drop_path
from monarch_flow.models.conv_branch import CellBranch
from monarch_flow.models.maps import Grid, map_to_tokens, tokens_to_map

NORM_EPS = 1e-6


@bfloat16_container
class NormalCell(nn.Module):
    """x + attention(norm1(x)) + PCM(x), then x + mlp(norm2(x)): (N, tokens, dim) to the same.

    The PCM, convolutions on the map of the tokens, sees the cell's input as it is. In training each
    of the three branches of each sample is left out with the probability `drop_path_rate`,
    independently.

    Args:
        dim: width of a token.
        num_heads: heads of attention; divides `dim`.
        mlp_ratio: hidden width of MLP and PCM over `dim`.
        conv_groups: groups of the PCM's convolutions.
        shallow: whether the PCM is the one of two convolutions, see `CellBranch`.
        class_token: whether the first token is none of the map's. It has no part in the PCM.
        drop: rate of dropout inside the MLP and after MLP and attention.
        attn_drop: rate of dropout of attention weights.
        drop_path_rate: see above.
        mlp_cfg: what `build_mlp` takes; None for dense layers.
        attnlinear_cfg: see `Attention`.

    Raises:
        UserError: heads or groups do not divide the width, or a config is none.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        conv_groups: int,
        *,
        shallow: bool = False,
        class_token: bool = False,
        drop: float,
        attn_drop: float,
        drop_path_rate: float,
        mlp_cfg: Mapping[str, Any] | None,
        attnlinear_cfg: LinearLike,
    ) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.class_token = class_token
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(
            dim,
            num_heads,
            attn_drop=attn_drop,
            proj_drop=drop,
            attnlinear_cfg=attnlinear_cfg,
        )
        # Without parameters and state, but three: each call draws anew.
        self.drop_path_local = drop_path(drop_path_rate)
        self.drop_path1 = drop_path(drop_path_rate)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = build_mlp(mlp_cfg, dim, hidden, drop=drop)
        self.drop_path2 = drop_path(drop_path_rate)
        self.PCM = CellBranch(dim, hidden, conv_groups, shallow=shallow)

    def forward(self, x: flow.Tensor, grid: Grid) -> flow.Tensor:
        """x (N, tokens, dim), whose tokens are a map of this (rows, columns), to the same."""
        on_map = x[:, 1:] if self.class_token else x
        local = self.drop_path_local(map_to_tokens(self.PCM(tokens_to_map(on_map, grid))))
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        x = self._add_local(x, local)
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def _add_local(self, x: flow.Tensor, local: flow.Tensor) -> flow.Tensor:
        if not self.class_token:
            return x + local
        return flow.cat([x[:, :1], x[:, 1:] + local], dim=1)
