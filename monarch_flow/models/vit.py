"""Vision transformer (Dosovitskiy et al. 2021, section 3.1)."""

from __future__ import annotations

from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearLike, MlpLike, dropout
from monarch_flow.models.blocks import (
    Block,
    Classifier,
    PatchEmbed,
    Size,
    drop_path_rates,
    init_transformer,
    prepend_token,
    small_normal_,
)


@bfloat16_container
class VisionTransformer(Classifier):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes); see `Classifier`.

    Patches become tokens, a class token goes before them, a learned position embedding is added;
    then pre-norm blocks, a layer norm and a linear head on the class token. Parameters in this
    order: `cls_token` (1, 1, dim), `pos_embed` (1, 1 + patches, dim), `patch_embed.proj`,
    `blocks.0` ... , `norm`, `head`.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        norm_eps: float = 1e-6,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: MlpLike = None,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim)
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(flow.zeros(1, 1, embed_dim))
        tokens = 1 + self.patch_embed.num_patches
        self.pos_embed = nn.Parameter(flow.zeros(1, tokens, embed_dim))
        self.pos_drop = dropout(drop_rate)
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
        small_normal_(self.pos_embed)
        small_normal_(self.cls_token)

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The normalized class token, (N, embed_dim); ValueError for images of another shape."""
        x = self.patch_embed(images)
        x = self.pos_drop(prepend_token(self.cls_token, x) + self.pos_embed)
        # Not [:, 0]: the gradient of a slice has no kernel on some devices.
        return self.norm(self.blocks(x).narrow(1, 0, 1).squeeze(1))
