"""Tokens-to-token module (Yuan et al. 2021, section 3.1): an image becomes tokens in three steps
of overlapping patches, with a small attention layer between."""

from __future__ import annotations

import math

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.attention import packed_attention

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import Mlp, dropout
from monarch_flow.models.attention import attention_macs
from monarch_flow.models.blocks import check_images

TOKEN_WIDTH = 64
NORM_EPS = 1e-5
# Inside the performer, whatever the model's rates are.
PERFORMER_DROPOUT = 0.1
# (kernel, stride, padding) of the three soft splits.
SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class _TokenSelfAttention(nn.Module):
    """One head between tokens of one width and tokens of another, with the values added to the
    result, as the input does not have their width."""

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


class TokenPerformer(nn.Module):
    """Attention that is linear in the number of tokens (Choromanski et al. 2021, positive random
    features), then x + mlp(norm2(x)): (N, tokens, in_dim) to (N, tokens, dim); one head.

    With phi(x) = exp(x w^T - |x|^2 / 2) / sqrt(m), the result is
    v + proj(phi(q) (phi(k)^T v) / (phi(q) sum_t phi(k)_t + 1e-8)).

    The projection `kqv` gives key, query and value in this order. `w` (m, dim) with m = dim / 2 is
    saved with the model and never trained: orthogonal rows of the length sqrt(m). The exponentials
    and the 1e-8 need float32, so that is what this computes in.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.num_random = dim // 2
        self.kqv = nn.Linear(in_dim, 3 * dim)
        self.dp = dropout(PERFORMER_DROPOUT)
        self.proj = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(in_dim, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), dropout(PERFORMER_DROPOUT)
        )
        self.w = nn.Parameter(_orthogonal(self.num_random, dim), requires_grad=False)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        kqv = self.kqv(self.norm1(x))
        dim = self.dim
        key, query, value = (kqv[:, :, part * dim : (part + 1) * dim] for part in range(3))
        out = value + self.dp(self.proj(self._attention(query, key, value)))
        return out + self.mlp(self.norm2(out))

    def _attention(self, query: flow.Tensor, key: flow.Tensor, value: flow.Tensor) -> flow.Tensor:
        keys, queries = self._random_features(key), self._random_features(query)
        summed = flow.matmul(keys.transpose(1, 2), value.to(keys.dtype))
        total = flow.matmul(queries, keys.sum(dim=1).unsqueeze(-1))
        return (flow.matmul(queries, summed) / (total + 1e-8)).to(value.dtype)

    def _random_features(self, x: flow.Tensor) -> flow.Tensor:
        """phi(x), (N, tokens, m), positive, in float32 at least."""
        w = self.w
        if x.dtype in (flow.float16, flow.bfloat16):
            x, w = x.to(flow.float32), w.to(flow.float32)
        half_squares = (x * x).sum(dim=-1, keepdim=True) / 2
        projected = flow.matmul(x, w.transpose(0, 1))
        return flow.exp(projected - half_squares) / math.sqrt(self.num_random)

    def own_macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulates for an input of this shape, without those of the linear layers:
        the features of key and query, their products with the values, and the normalizer."""
        return shape[0] * shape[1] * self.num_random * (4 * self.dim + 1)


def _orthogonal(rows: int, columns: int) -> flow.Tensor:
    """Orthogonal rows, each of the length sqrt(rows), from OneFlow's generator."""
    gauss = flow.randn(columns, rows).numpy().astype(np.float64)
    q, r = np.linalg.qr(gauss)
    # The signs make the distribution uniform (Mezzadri 2007, section 5).
    return flow.tensor((q * np.sign(np.diag(r))).T.astype(np.float32) * math.sqrt(rows))


class TokensToToken(nn.Module):
    """Images to tokens (N, patches, dim): soft splits, which are overlapping patches, with a small
    transformer between each and the next. An image gets 16 times smaller each way.

    Args:
        img_size: height and width of an image.
        in_chans: channels of an image.
        dim: width of a token that comes out.
        tokens_type: "transformer" or "performer".
    """

    def __init__(
        self, img_size: tuple[int, int], in_chans: int, dim: int, tokens_type: str
    ) -> None:
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


def _map_sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """(rows, columns) of tokens after each split."""
    sizes = []
    for kernel, stride, padding in SPLITS:
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in size)
        size = (height, width)
        sizes.append(size)
    if min(size) < 1:
        raise UserError(f"an image of {sizes[0]} splits into no token: choose a larger img_size")
    return sizes


def _soft_split(x: flow.Tensor, kernel: int, stride: int, padding: int) -> flow.Tensor:
    """(N, C, H, W) to (N, patches, C kernel kernel): channel slow, column of the kernel fast."""
    return nn.functional.unfold(x, kernel, 1, padding, stride).transpose(1, 2)


def _as_map(x: flow.Tensor, size: tuple[int, int]) -> flow.Tensor:
    """(N, H W, C) to (N, C, H, W)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *size)
