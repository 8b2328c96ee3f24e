"""Multi-head self-attention, with dense or structured projections."""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container
from oneflow_accel.kernels.attention import packed_attention

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearConfig, LinearLike, dropout


def attention_macs(tokens: int, width: int) -> int:
    """Multiply-accumulates of query key^T and of weights value for one sequence: tokens^2 width
    each, whatever the number of heads."""
    return 2 * tokens * tokens * width


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
        if self.training and self.attn_drop_rate:
            out = self._with_dropped_weights(qkv)
        else:
            out = packed_attention(qkv, self.num_heads)
        return self.proj_drop(self.proj(out))

    def _with_dropped_weights(self, qkv: flow.Tensor) -> flow.Tensor:
        """Attention step by step, as `packed_attention` keeps no weights that could be dropped."""
        batch, tokens = qkv.shape[:2]
        parts = qkv.reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        query, key, value = (parts[:, :, part].permute(0, 2, 1, 3) for part in range(3))
        scores = flow.matmul(query * self.head_dim**-0.5, key.transpose(-2, -1))
        weights = self.attn_drop(flow.softmax(scores, dim=-1))
        return flow.matmul(weights, value).permute(0, 2, 1, 3).reshape(batch, tokens, -1)

    def own_macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulates of the two products, without the linear layers."""
        return shape[0] * attention_macs(shape[1], self.num_heads * self.head_dim)
