"""Tokens-to-token module (Yuan et al. 2021, section 3.1). An image becomes tokens in three steps of
overlapping patches, with a small attention layer between."""

from __future__ import annotations

import math

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.attention import packed_attention

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import Mlp
from monarch_flow.models.attention import attention_macs
from monarch_flow.models.blocks import check_images
from monarch_flow.models.maps import Grid, channels_first, tokens_to_map
from monarch_flow.models.performer import NORM_EPS, TokenPerformer

TOKEN_WIDTH = 64
# (kernel, stride, padding) of the three soft splits.
SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class _TokenSelfAttention(nn.Module):
    """One head from tokens of one width to tokens of another; as the input cannot be added to the
    result, the values are."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        # The width of the input and not of a head, as in the published models.
        self.scale = in_dim**-0.5
        self.qkv = nn.Linear(in_dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        qkv = self.qkv(x)
        out = self.proj(packed_attention(qkv, 1, scale=self.scale))
        return qkv[:, :, 2 * self.dim :] + out

    def own_macs(self, shape: tuple[int, ...]) -> int:
        return shape[0] * attention_macs(shape[1], self.dim)


class TokenTransformer(nn.Module):
    """v + proj(attention(norm1(x))), then x + mlp(norm2(x)): (N, tokens, in_dim) to (N, tokens,
    dim); with one head and the scale in_dim^-0.5."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim, eps=NORM_EPS)
        self.attn = _TokenSelfAttention(in_dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim, dim)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokensToToken(nn.Module):
    """Images to tokens (N, patches, dim), a map 16 times smaller each way.

    Soft splits, which are overlapping patches, alternate with small transformers; `tokens_type` is
    "transformer" or "performer". Raises UserError for another one, or an image too small to be
    split.
    """

    def __init__(self, img_size: Grid, in_chans: int, dim: int, tokens_type: str) -> None:
        super().__init__()
        kinds: dict[str, type[nn.Module]] = {
            "transformer": TokenTransformer,
            "performer": TokenPerformer,
        }
        if tokens_type not in kinds:
            raise UserError(f"tokens_type={tokens_type!r} is none of {', '.join(kinds)}")
        self.img_size, self.in_chans = img_size, in_chans
        self.maps = _map_sizes(img_size)
        self.num_patches = math.prod(self.maps[-1])
        kernel = SPLITS[0][0]
        self.attention1 = kinds[tokens_type](in_chans * kernel * kernel, TOKEN_WIDTH)
        self.attention2 = kinds[tokens_type](TOKEN_WIDTH * SPLITS[1][0] ** 2, TOKEN_WIDTH)
        self.project = nn.Linear(TOKEN_WIDTH * SPLITS[2][0] ** 2, dim)

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        check_images(images, self.in_chans, self.img_size)
        x = self.attention1(_soft_split(images, *SPLITS[0]))
        x = self.attention2(_soft_split(_as_map(x, self.maps[0]), *SPLITS[1]))
        return self.project(_soft_split(_as_map(x, self.maps[1]), *SPLITS[2]))


def _map_sizes(size: Grid) -> list[Grid]:
    """(rows, columns) of tokens after each split of an image of (height, width)."""
    sizes = []
    left = size
    for kernel, stride, padding in SPLITS:
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in left)
        left = (height, width)
        sizes.append(left)
    if min(left) < 1:
        raise UserError(f"an image of {size} splits into no token: choose a larger img_size")
    return sizes


def _as_map(x: flow.Tensor, size: Grid) -> flow.Tensor:
    """(N, H W, C) to (N, C, H, W), as the unfolding takes it."""
    return channels_first(tokens_to_map(x, size))


def _soft_split(x: flow.Tensor, kernel: int, stride: int, padding: int) -> flow.Tensor:
    """(N, C, H, W) to (N, patches, C kernel kernel): the channel varies slowest, the kernel's
    column fastest."""
    return nn.functional.unfold(x, kernel, 1, padding, stride).transpose(1, 2)
