"""Tokens-to-token vision transformer (Yuan et al. 2021, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.inference import bfloat16_container

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearLike, dropout
from monarch_flow.models.blocks import Block, Size, drop_path_rates, prepend_token
from monarch_flow.models.classifier import Classifier
from monarch_flow.models.initialization import init_transformer, small_normal_
from monarch_flow.models.performer import NORM_EPS
from monarch_flow.models.tokens_to_token import TokensToToken


def sinusoid_table(tokens: int, dim: int) -> np.ndarray:
    """Position embedding (1, tokens, dim), float32, computed in float64 (Vaswani et al. 2017,
    section 3.5): with the angle p / 10000^(2 floor(j / 2) / dim), its sine where j is even, its
    cosine where it is odd."""
    columns = np.arange(dim)
    angles = np.arange(tokens)[:, None] / np.power(10000.0, 2 * (columns // 2) / dim)
    table = np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))
    return table[None].astype(np.float32)


@bfloat16_container
class PositionEmbedding(nn.Module):
    """x + pe, then dropout; the table `pe` is a buffer: saved and not trained."""

    def __init__(self, tokens: int, dim: int, drop: float) -> None:
        super().__init__()
        self.register_buffer("pe", flow.tensor(sinusoid_table(tokens, dim)))
        self.dropout = dropout(drop)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.dropout(x + self.pe)


@bfloat16_container
class T2TViT(Classifier):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes).

    `patch_embed` makes tokens of the image, a class token goes before them, a fixed sinusoid is
    added (`pos_embed.pe`); then the blocks of a vision transformer, a layer norm and a linear head
    on the class token. `tokens_type`, "transformer" or "performer", is the attention inside
    `patch_embed`; the arguments of `Classifier` are for what follows it.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        tokens_type: str = "performer",
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        norm_eps: float = NORM_EPS,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: Mapping[str, Any] | None = None,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim)
        self.cls_token = nn.Parameter(flow.zeros(1, 1, embed_dim))
        self.patch_embed = TokensToToken(self.img_size, in_chans, embed_dim, tokens_type)
        tokens = 1 + self.patch_embed.num_patches
        self.pos_embed = PositionEmbedding(tokens, embed_dim, drop_rate)
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    qkv_bias=qkv_bias,
                    drop=drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path_rate=rate,
                    norm_eps=norm_eps,
                    mlp_cfg=mlp_cfg,
                    attnlinear_cfg=attnlinear_cfg,
                )
                for rate in drop_path_rates(drop_path_rate, depth)
            )
        )
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.head = nn.Linear(embed_dim, num_classes)
        init_transformer(self)
        small_normal_(self.cls_token)

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The normalized class token, (N, embed_dim); ValueError for images of another shape."""
        x = self.patch_embed(images)
        x = self.pos_embed(prepend_token(self.cls_token, x))
        return self.norm(self.blocks(x)[:, 0])
