"""What the models have in common: the patch embedding and the pre-norm transformer block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import DropPath, LinearLike, build_mlp
from monarch_flow.models.attention import Attention
from monarch_flow.models.maps import channels_last, map_to_tokens

Size = int | Sequence[int]


def image_size(size: Size) -> tuple[int, int]:
    """(height, width) of an int, for a square, or of a pair; UserError unless positive."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UserError(f"img_size={size!r} is neither a positive number nor (height, width)")
    return pair[0], pair[1]


def check_images(images: flow.Tensor, in_chans: int, size: tuple[int, int]) -> None:
    """Raises ValueError where images are not (N, in_chans, *size)."""
    expected = (in_chans, *size)
    if images.ndim != 4 or tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images of shape {tuple(images.shape)} do not fit a model built for (N, "
            f"{', '.join(map(str, expected))}): build it with other img_size and in_chans"
        )


def drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate else nn.Identity()


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The rate of each block, rising linearly from 0 to `rate` (Huang et al. 2016, section 3)."""
    return [float(value) for value in np.linspace(0.0, rate, depth)]


def prepend_token(token: flow.Tensor, x: flow.Tensor) -> flow.Tensor:
    """token (1, 1, dim) before those of each sample: x (N, tokens, dim) to (N, 1 + tokens, dim)."""
    first = token.expand(x.shape[0], -1, -1)
    if x.is_global:
        # Give the token the batch's layout, or concatenation gathers the batch on every rank.
        first = first.to_global(sbp=x.sbp)
    return flow.cat([first, x], dim=1)


@bfloat16_container
class PatchEmbed(nn.Module):
    """Images (N, in_chans, height, width) to tokens (N, patches, dim), row by row.

    The convolution `proj` has a weight (dim, in_chans, patch, patch), a bias and a stride of its
    size. Raises UserError where the patch does not divide the image; the forward pass raises
    ValueError for images of another shape.
    """

    def __init__(self, img_size: Size, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.img_size = image_size(img_size)
        self.in_chans = in_chans
        if patch_size < 1 or any(side % patch_size for side in self.img_size):
            raise UserError(
                f"patches of {patch_size} do not divide an image of {self.img_size}: choose "
                "img_size as a multiple of patch_size"
            )
        self.num_patches = math.prod(side // patch_size for side in self.img_size)
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size)

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        check_images(images, self.in_chans, self.img_size)
        return map_to_tokens(channels_last(self.proj(images)))


class TokenMean(nn.Module):
    """(N, tokens, dim) to (N, dim). Not a bfloat16 container, so its mean is taken in float32."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return x.mean(dim=1)


@bfloat16_container
class Block(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)): (N, tokens, dim) to the same, as in ViT
    (Dosovitskiy et al. 2021, equations 2 and 3).

    In training each branch of each sample is left out with probability `drop_path_rate`, the two of
    a block independently. Raises UserError where the heads do not divide the width, or a config is
    wrong.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        *,
        qkv_bias: bool,
        drop: float,
        attn_drop: float,
        drop_path_rate: float,
        norm_eps: float,
        mlp_cfg: Mapping[str, Any] | None,
        attnlinear_cfg: LinearLike,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(
            dim,
            num_heads,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=drop,
            attnlinear_cfg=attnlinear_cfg,
        )
        # These are separate modules, though without parameters, as each call draws anew.
        self.drop_path1 = drop_path(drop_path_rate)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = build_mlp(mlp_cfg, dim, int(dim * mlp_ratio), drop=drop)
        self.drop_path2 = drop_path(drop_path_rate)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))
