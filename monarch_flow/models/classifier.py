"""What every model is: images to features, and a linear head that gives scores."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from monarch_flow.models.blocks import Size, image_size


class Classifier(nn.Module):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes).

    The models' constructors spell their arguments out with their own defaults, as configs,
    `default_config` and type checkers read them there. These mean the same in all that have them:

        img_size: height and width of an image; one number for a square.
        patch_size: side of a patch, which must divide both.
        depth: blocks, or normal cells.
        num_heads: must divide the width of a token.
        mlp_ratio: hidden width of the MLPs over that of their tokens.
        qkv_bias: whether the projections to query, key and value have a bias.
        norm_eps: epsilon of the layer norms, except in T2T-ViT's `patch_embed`.
        drop_rate: dropout after a position embedding, in the MLPs and after each branch.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0 at the first.
        mlp_cfg: layers of the MLPs, as `monarch_flow.layers.build_mlp` takes it; None for dense.
        attnlinear_cfg: layers of the projections to query, key and value, as `LinearConfig.of`
            takes it; None for one packed dense layer.

    `features` gives a width of `num_features`, and `head` makes the scores of it. Raises UserError
    where sizes do not fit each other, or a config is wrong.
    """

    head: nn.Module

    def __init__(self, img_size: Size, in_chans: int, num_classes: int, num_features: int) -> None:
        super().__init__()
        self.img_size = image_size(img_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = num_features

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """Images to what the head takes, (N, num_features)."""
        raise NotImplementedError

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        return self.head(self.features(images))
