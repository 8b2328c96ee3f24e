"""Attention: of several heads, with dense or structured projections, and linear in the tokens."""

from __future__ import annotations

import math

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container
from oneflow_accel.kernels.attention import (
    can_drop_weights,
    draw_seed,
    packed_attention,
    performer_attention,
)

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.metrics.work import attention_macs
from monarch_flow.layers import LinearConfig, LinearLike, dropout


@bfloat16_container
class Attention(nn.Module):
    """softmax(q k^T / sqrt(head width)) v for each head, then a linear layer (Vaswani et al. 2017,
    section 3.2.2): (N, tokens, dim) to (N, tokens, dim).

    Parameters, in this order: `qkv.weight` (3 dim, dim) with rows in the order query, key, value
    and each split by heads; `qkv.bias` (3 dim,) where there is one; `proj.weight` (dim, dim),
    `proj.bias` (dim,). With `attnlinear_cfg`, which `LinearConfig.of` reads, the packed projection
    is three structured layers, `q_proj`, `k_proj` and `v_proj`; `proj` stays dense. Raises
    UserError where the heads do not divide the width, or the config is wrong.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise UserError(f"{num_heads} heads do not divide a width of {dim}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.packed = attnlinear_cfg is None
        if self.packed:
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        else:
            config = LinearConfig.of(attnlinear_cfg)
            self.q_proj = config.build(dim, dim, bias=qkv_bias)
            self.k_proj = config.build(dim, dim, bias=qkv_bias)
            self.v_proj = config.build(dim, dim, bias=qkv_bias)
        self.attn_drop_rate = attn_drop
        self.attn_drop = dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = dropout(proj_drop)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        if self.packed:
            qkv = self.qkv(x)
        else:
            # This is one copy, as the parts of a packed projection are read in place.
            qkv = flow.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        if not (self.training and self.attn_drop_rate):
            out = packed_attention(qkv, self.num_heads)
        elif can_drop_weights(qkv):
            drop = {"dropout": self.attn_drop_rate, "seed": draw_seed(qkv)}
            out = packed_attention(qkv, self.num_heads, **drop)
        else:
            out = self._with_dropped_weights(qkv)
        return self.proj_drop(self.proj(out))

    def _with_dropped_weights(self, qkv: flow.Tensor) -> flow.Tensor:
        """Attention step by step, where no kernel drops out weights."""
        batch, tokens = qkv.shape[:2]
        parts = qkv.reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        query, key, value = (
            parts.narrow(2, part, 1).squeeze(2).permute(0, 2, 1, 3) for part in range(3)
        )
        scores = flow.matmul(query * self.head_dim**-0.5, key.transpose(-2, -1))
        weights = self.attn_drop(flow.softmax(scores, dim=-1))
        return flow.matmul(weights, value).permute(0, 2, 1, 3).reshape(batch, tokens, -1)

    def own_macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulates of the two products, without the linear layers."""
        return shape[0] * attention_macs(shape[1], self.num_heads * self.head_dim)


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
        self.w = nn.Parameter(orthogonal(self.num_random, dim), requires_grad=False)

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


def orthogonal(rows: int, columns: int) -> flow.Tensor:
    """Orthogonal rows, each of length sqrt(rows), from OneFlow's generator."""
    gauss = flow.randn(columns, rows).numpy().astype(np.float64)
    q, r = np.linalg.qr(gauss)
    # The signs make the distribution uniform (Mezzadri 2007, section 5).
    return flow.tensor((q * np.sign(np.diag(r))).T.astype(np.float32) * math.sqrt(rows))
