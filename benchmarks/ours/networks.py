"""The networks that PyTorch's side gets from timm and transformers."""

from __future__ import annotations

from oneflow_accel.inference import bfloat16_container
from oneflow_accel.kernels.attention import packed_attention

import oneflow as flow
from oneflow import nn


@bfloat16_container
class Attention(nn.Module):
    """(B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.proj(packed_attention(self.qkv(x), self.heads, causal=self.causal))


@bfloat16_container
class Block(nn.Module):
    """(B, T, C) to (B, T, C); GPT-2's are causal, with the GELU that has a tanh."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        epsilon, form = (1e-5, "tanh") if causal else (1e-6, "none")
        self.norm1 = nn.LayerNorm(width, eps=epsilon)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width, eps=epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate=form), nn.Linear(4 * width, width)
        )

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) small, 124 M parameters, as transformers' GPT2LMHeadModel has it,
    without dropout: token ids (B, T), int64, to logits (B, T, 50257)."""

    def __init__(
        self, vocabulary: int = 50257, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: flow.Tensor) -> flow.Tensor:
        positions = flow.arange(ids.shape[1], device=ids.device)
        x = self.ln_f(self.blocks(self.wte(ids) + self.wpe(positions)))
        return flow._C.matmul(x, self.wte.weight, transpose_b=True)


@bfloat16_container
class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2021, section 3.1) as timm's vit_small_patch16_224 has it: images
    (N, 3, 224, 224) to scores (N, 1000)."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 16, 16)
        self.cls_token = nn.Parameter(flow.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * flow.randn(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        x = flow.cat([cls, x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])
