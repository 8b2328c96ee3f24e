"""Attention that is linear in the number of tokens, used before the blocks of T2T-ViT and ViTAE."""

from __future__ import annotations

import math

from oneflow_accel.kernels.attention import performer_attention

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import dropout

NORM_EPS = 1e-5
# The performer's dropout, whatever the model's rates are.
DROPOUT = 0.1


class TokenPerformer(nn.Module):
    """Attention that is linear in the number of tokens (Choromanski et al. 2021, positive random
    features), then x + mlp(norm2(x)): (N, tokens, in_dim) to (N, tokens, dim); one head.

    With phi(x) = exp(x w^T - |x|^2 / 2) / sqrt(m), the result is
    v + proj(phi(q) (phi(k)^T v) / (phi(q) sum_t phi(k)_t + 1e-8)).

    The projection `kqv` gives key, query and value in this order. `w` (m, dim) with m = dim / 2 is
    saved with the model and never trained: orthogonal rows of the length sqrt(m). The exponentials
    and the 1e-8 need float32, so that is what `performer_attention` computes in.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.num_random = dim // 2
        self.kqv = nn.Linear(in_dim, 3 * dim)
        self.dp = dropout(DROPOUT)
        self.proj = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(in_dim, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), dropout(DROPOUT)
        )
        self.w = nn.Parameter(_orthogonal(self.num_random, dim), requires_grad=False)

    def forward(self, x: flow.Tensor, local: flow.Tensor | None = None) -> flow.Tensor:
        """x (N, tokens, in_dim) to (N, tokens, dim); `local`, if any, is added before the MLP."""
        out = self.attention(x)
        if local is not None:
            out = out + local
        return out + self.mlp(self.norm2(out))

    def attention(self, x: flow.Tensor) -> flow.Tensor:
        """The attention alone: x (N, tokens, in_dim), not normalized, to (N, tokens, dim)."""
        out, value = performer_attention(self.kqv(self.norm1(x)), self.w)
        return value + self.dp(self.proj(out))

    def own_macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulates without the linear layers: the features of key and query, their
        products with the values, and the normalizer."""
        return shape[0] * shape[1] * self.num_random * (4 * self.dim + 1)


def _orthogonal(rows: int, columns: int) -> flow.Tensor:
    """Orthogonal rows, each of length sqrt(rows), from OneFlow's generator."""
    gauss = flow.randn(columns, rows).numpy().astype(np.float64)
    q, r = np.linalg.qr(gauss)
    # The signs make the distribution uniform (Mezzadri 2007, section 5).
    return flow.tensor((q * np.sign(np.diag(r))).T.astype(np.float32) * math.sqrt(rows))
