"""What every model is: images to scores, by features and a linear head."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from monarch_flow.models.blocks import Size, image_size


class Classifier(nn.Module):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes).

    The models' constructors spell their arguments out with defaults of their own, as configs,
    `default_config` and type checkers read them there. These mean the same in all that have them:

        img_size: height and width of an image; one number for a square.
        patch_size: side of a patch, which divides both.
        in_chans: channels of an image.
        num_classes: scores.
        embed_dim: width of a token.
        depth: blocks, or normal cells.
        num_heads: their heads of attention; divides the width of their tokens.
        mlp_ratio: hidden width of their MLPs over that of their tokens.
        qkv_bias: whether their projections to query, key and value have a bias.
        norm_eps: epsilon of the layer norms, but for those of T2T-ViT's `patch_embed`.
        drop_rate: rate of dropout after a position embedding, in the MLPs and after each branch.
        attn_drop_rate: rate of dropout of attention weights.
        drop_path_rate: stochastic depth of the last block; that of the first is 0, and it rises
            linearly between.
        mlp_cfg: layers of the MLPs, as `monarch_flow.layers.build_mlp` takes it; None for dense.
        attnlinear_cfg: layers of the projections to query, key and value, as `LinearConfig.of`
            takes it; None for one packed dense layer.

    Attributes:
        img_size: (height, width) that the model was built for.
        in_chans: see above.
        num_classes: see above.
        num_features: width of what `features` gives.
        head: from there to the scores.

    Raises:
        UserError: sizes that do not fit each other, or a config that is none.
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
