"""ViTAE's normal cell (Xu et al. 2021, section 3): convolutions run beside the attention."""

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
    of the three branches of each sample is left out with probability `drop_path_rate`,
    independently.

    Args:
        mlp_ratio: hidden width of MLP and PCM over `dim`.
        shallow: whether the PCM has only two convolutions, see `CellBranch`.
        class_token: whether the first token is outside the map; the PCM does not see it.
        drop: dropout inside the MLP and after MLP and attention.

    Raises:
        UserError: heads or groups do not divide the width, or a config is wrong.
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
            dim, num_heads, attn_drop=attn_drop, proj_drop=drop, attnlinear_cfg=attnlinear_cfg
        )
        # These are separate modules, though without parameters, as each call draws anew.
        self.drop_path_local = drop_path(drop_path_rate)
        self.drop_path1 = drop_path(drop_path_rate)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = build_mlp(mlp_cfg, dim, hidden, drop=drop)
        self.drop_path2 = drop_path(drop_path_rate)
        self.PCM = CellBranch(dim, hidden, conv_groups, shallow=shallow)

    def forward(self, x: flow.Tensor, grid: Grid) -> flow.Tensor:
        """x (N, tokens, dim) to the same; `grid` is (rows, columns) of the tokens' map."""
        on_map = x[:, 1:] if self.class_token else x
        local = self.drop_path_local(map_to_tokens(self.PCM(tokens_to_map(on_map, grid))))
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        x = self._add_local(x, local)
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def _add_local(self, x: flow.Tensor, local: flow.Tensor) -> flow.Tensor:
        if not self.class_token:
            return x + local
        return flow.cat([x[:, :1], x[:, 1:] + local], dim=1)
