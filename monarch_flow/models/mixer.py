"""MLP-Mixer (Tolstikhin et al. 2021, section 2)."""

from __future__ import annotations

from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import MlpLike, build_mlp
from monarch_flow.models.blocks import (
    Classifier,
    PatchEmbed,
    Size,
    TokenMean,
    drop_path,
    init_mixer,
)


@bfloat16_container
class MixerBlock(nn.Module):
    """An MLP over the tokens of each channel, then one over the channels of each token, each on a
    layer norm and added to its input: (N, tokens, dim) to the same.

    `build_mlp` reads the configs. Raises UserError where one is wrong.
    """

    def __init__(
        self,
        dim: int,
        tokens: int,
        token_hidden: int,
        channel_hidden: int,
        *,
        norm_eps: float,
        drop: float,
        drop_path_rate: float,
        token_mlp_cfg: MlpLike,
        channel_mlp_cfg: MlpLike,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp_tokens = build_mlp(token_mlp_cfg, tokens, token_hidden, drop=drop)
        self.drop_path1 = drop_path(drop_path_rate)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp_channels = build_mlp(channel_mlp_cfg, dim, channel_hidden, drop=drop)
        self.drop_path2 = drop_path(drop_path_rate)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        mixed = self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.drop_path1(mixed)
        return x + self.drop_path2(self.mlp_channels(self.norm2(x)))


@bfloat16_container
class MlpMixer(Classifier):
    """A patch embedding `stem`, blocks, a layer norm, the mean over tokens and a linear head.

    Shapes, arguments and errors are those of `Classifier`, except:

    Args:
        token_ratio, channel_ratio: hidden width of the MLP over tokens or channels, over
            `embed_dim`.
        drop_rate: dropout in the MLPs only.
        drop_path_rate: stochastic depth, the same in every block.
        mlp_cfg, token_mlp_cfg: layers of the MLPs over channels, and over tokens.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 512,
        depth: int = 8,
        token_ratio: float = 0.5,
        channel_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: MlpLike = None,
        token_mlp_cfg: MlpLike = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim)
        self.stem = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.blocks = nn.Sequential(
            *(
                MixerBlock(
                    embed_dim,
                    self.stem.num_patches,
                    int(token_ratio * embed_dim),
                    int(channel_ratio * embed_dim),
                    norm_eps=norm_eps,
                    drop=drop_rate,
                    drop_path_rate=drop_path_rate,
                    token_mlp_cfg=token_mlp_cfg,
                    channel_mlp_cfg=mlp_cfg,
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.pool = TokenMean()
        self.head = nn.Linear(embed_dim, num_classes)
        init_mixer(self)

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The mean of the normalized tokens, (N, embed_dim); ValueError for another image shape."""
        return self.pool(self.norm(self.blocks(self.stem(images))))
