"""Tokens-to-token vision transformer (Yuan et al. 2021, section 3), and the names in its published
checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container
from oneflow_accel.kernels.attention import packed_attention

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.metrics.work import attention_macs
from monarch_flow.layers import LinearLike, Mlp, MlpLike, dropout
from monarch_flow.models.attention import NORM_EPS, TokenPerformer
from monarch_flow.models.blocks import (
    Block,
    Classifier,
    Grid,
    Size,
    check_images,
    convolved,
    drop_path_rates,
    init_transformer,
    prepend_token,
    small_normal_,
    tokens_to_map,
)
from monarch_flow.models.local_attention import LocalAttention

TOKEN_WIDTH = 64
# (kernel, stride, padding) of the three soft splits.
SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class _TokenSelfAttention(nn.Module):
    """One head from tokens of one width to tokens of another; as the input cannot be added to the
    result, the values are. `attention_layer` sees less than all, and counts its own products."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        # The width of the input and not of a head, as in the published models.
        self.scale = in_dim**-0.5
        self.qkv = nn.Linear(in_dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.attention_layer: LocalAttention | None = None

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        qkv = self.qkv(x)
        attend = self.attention_layer or partial(packed_attention, num_heads=1, scale=self.scale)
        return qkv[:, :, 2 * self.dim :] + self.proj(attend(qkv))

    def own_macs(self, shape: tuple[int, ...]) -> int:
        return 0 if self.attention_layer else shape[0] * attention_macs(shape[1], self.dim)


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
    sizes = [size]
    for split in SPLITS:
        sizes.append(convolved(sizes[-1], *split))
    if min(sizes[-1]) < 1:
        raise UserError(f"an image of {size} splits into no token: choose a larger img_size")
    return sizes[1:]


def _as_map(x: flow.Tensor, size: Grid) -> flow.Tensor:
    """(N, H W, C) to (N, C, H, W), as the unfolding takes it."""
    return tokens_to_map(x, size).permute(0, 3, 1, 2)


def _soft_split(x: flow.Tensor, kernel: int, stride: int, padding: int) -> flow.Tensor:
    """(N, C, H, W) to (N, patches, C kernel kernel): the channel varies slowest, the kernel's
    column fastest."""
    return nn.functional.unfold(x, kernel, 1, padding, stride).transpose(1, 2)


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
    `patch_embed`; of its two transformers, `t2tattn1_cfg` and `t2tattn2_cfg` make `LocalAttention`,
    which performers leave be. The arguments of `Classifier` are for what follows it.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        tokens_type: str = "performer",
        t2tattn1_cfg: Mapping[str, int] | None = None,
        t2tattn2_cfg: Mapping[str, int] | None = None,
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        norm_eps: float = NORM_EPS,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: MlpLike = None,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim)
        self.cls_token = nn.Parameter(flow.zeros(1, 1, embed_dim))
        self.patch_embed = TokensToToken(self.img_size, in_chans, embed_dim, tokens_type)
        parts = self.patch_embed.attention1, self.patch_embed.attention2
        for part, cfg in zip(parts, (t2tattn1_cfg, t2tattn2_cfg), strict=True):
            if cfg and tokens_type == "transformer":
                part.attn.attention_layer = LocalAttention(TOKEN_WIDTH, part.attn.scale, cfg)
            elif cfg and cfg.get("local_context"):
                raise UserError("performers have no local_context: set tokens_type=transformer")
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
        # Not [:, 0]: the gradient of a slice has no kernel on some devices.
        return self.norm(self.blocks(x).narrow(1, 0, 1).squeeze(1))


_T2T_TOKENS = "tokens_to_token."


def is_published_t2t(state: Mapping[str, np.ndarray]) -> bool:
    return "pos_embed" in state and any(name.startswith(_T2T_TOKENS) for name in state)


def t2t_names(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A published T2T-ViT's state dict under our names: `tokens_to_token.*` becomes
    `patch_embed.*`, `pos_embed` the buffer `pos_embed.pe`. Raises UserError for any other state
    dict."""
    if "pos_embed.pe" in state:
        raise UserError("these weights have our names already (they have 'pos_embed.pe')")
    if not is_published_t2t(state):
        raise UserError(
            f"not a published T2T-ViT: there is no 'pos_embed' and '{_T2T_TOKENS}*'; it has "
            f"{', '.join(list(state)[:6])} ..."
        )
    return {
        "pos_embed.pe" if name == "pos_embed" else name.replace(_T2T_TOKENS, "patch_embed."): array
        for name, array in state.items()
    }
