"""GPT-2 (Radford et al. 2019) small, 124 M parameters, as transformers' GPT2LMHeadModel has it:
pre-norm blocks, tanh GELU, the head tied to the token embedding; no dropout."""

from __future__ import annotations

from oneflow_accel.kernels.attention import packed_attention

import oneflow as flow
from oneflow import nn


class Block(nn.Module):
    """(B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        qkv = self.qkv(self.ln_1(x))
        x = x + self.proj(packed_attention(qkv, self.heads, causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Token ids (B, T), int64, to logits (B, T, 50257)."""

    def __init__(
        self, vocabulary: int = 50257, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: flow.Tensor) -> flow.Tensor:
        positions = flow.arange(ids.shape[1], device=ids.device)
        x = self.ln_f(self.blocks(self.wte(ids) + self.wpe(positions)))
        return flow._C.matmul(x, self.wte.weight, transpose_b=True)
