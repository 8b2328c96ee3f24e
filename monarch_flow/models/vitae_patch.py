"""The large ViTAEs, B to H (Zhang et al. 2022, "ViTAEv2"): a ViT's patch embedding and class token,
then normal cells with shallow convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearLike
from monarch_flow.models.blocks import PatchEmbed, Size, TokenMean, drop_path_rates, prepend_token
from monarch_flow.models.classifier import Classifier
from monarch_flow.models.initialization import init_transformer
from monarch_flow.models.normal_cell import NORM_EPS, NormalCell
from monarch_flow.models.vitae import Stage


@bfloat16_container
class PatchCell(nn.Module):
    """Images (N, in_chans, *img_size) to tokens (N, 1 + patches, dim): a patch embedding `PRM`, a
    class token before its tokens, and a learned position embedding on all of them."""

    def __init__(self, img_size: Size, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.PRM = PatchEmbed(img_size, patch_size, in_chans, dim)
        self.pos_embed = nn.Parameter(flow.zeros(1, 1 + self.PRM.num_patches, dim))
        self.cls_token = nn.Parameter(flow.zeros(1, 1, dim))

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        return prepend_token(self.cls_token, self.PRM(images)) + self.pos_embed


@bfloat16_container
class PatchViTAE(Classifier):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes).

    Patches become tokens behind a class token; then normal cells with shallow convolutions, the
    mean over the patches' tokens, a layer norm and a linear head. The class token takes part in
    attention only.

    Parameters and buffers in this order: `fc_norm`, `layers.0.RC` (pos_embed, cls_token, PRM.proj),
    `layers.2.NC.0` ... , `head`; in a cell norm1, attn, norm2, mlp, PCM. Names and order are those
    of the published checkpoints, which count three stages.

    Arguments and errors are those of `Classifier`; `mlp_ratio` holds for the cells' convolutions
    too, and `drop_rate` does not drop after the position embedding.
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
        conv_groups: int = 192,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: Mapping[str, Any] | None = None,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim)
        reduction = PatchCell(img_size, patch_size, in_chans, embed_dim)
        height, width = self.img_size
        self.grid = (height // patch_size, width // patch_size)
        # It is made before the cells, as in the published checkpoints.
        self.fc_norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        cells = [
            NormalCell(
                embed_dim,
                num_heads,
                mlp_ratio,
                conv_groups,
                shallow=True,
                class_token=True,
                drop=drop_rate,
                attn_drop=attn_drop_rate,
                drop_path_rate=rate,
                mlp_cfg=mlp_cfg,
                attnlinear_cfg=attnlinear_cfg,
            )
            for rate in drop_path_rates(drop_path_rate, depth)
        ]
        self.layers = nn.ModuleList(
            [Stage(reduction), Stage(nn.Identity()), Stage(nn.Identity(), cells)]
        )
        self.pool = TokenMean()
        self.head = nn.Linear(embed_dim, num_classes)
        init_transformer(self)

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The normalized mean of patch tokens, (N, embed_dim); ValueError for another image
        shape."""
        x = images
        for stage in self.layers:
            x = stage(x, self.grid)
        return self.fc_norm(self.pool(x[:, 1:]))
