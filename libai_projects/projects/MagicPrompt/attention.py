"""Causal self-attention for training: on global tensors, heads split over tensor parallelism."""

from __future__ import annotations

import math

from oneflow_accel.kernels.attention import packed_attention
from oneflow_accel.kernels.dropout import HIDDEN, causal_softmax

import oneflow as flow
from libai.layers import Dropout
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.projects.MagicPrompt.dropout import (
    bias_dropout,
    fused_causal_softmax_dropout,
    is_active,
)
from libai_projects.projects.MagicPrompt.model_options import ModelOptions
from libai_projects.projects.MagicPrompt.projections import projection
from libai_projects.weights.monarch import DENSE, QKV


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(head_size)) v of each head, with its projections (Vaswani et al. 2017).

    The projection of queries, keys and values has them interleaved by head, (heads, 3, head_size)
    on its output axis, so that a split of that axis gives each process whole heads.

    Args:
        options: sizes, dropout probabilities and fusions.
        layer_idx: layer, from which the pipeline stage follows.
    """

    def __init__(self, options: ModelOptions, *, layer_idx: int) -> None:
        super().__init__()
        hidden = options.hidden_size
        self.num_heads = options.num_attention_heads
        self.head_size = options.head_size
        self.fused_attention = bool(options.attention_fusion)
        self.fused_softmax = bool(options.scale_mask_softmax_fusion)
        self.layer_scale = layer_idx + 1 if options.apply_query_key_layer_scaling else 1
        self.query_key_value = projection(
            options,
            QKV,
            hidden,
            3 * hidden,
            parallel="col",
            layer_idx=layer_idx,
        )
        self.dense = projection(
            options,
            DENSE,
            hidden,
            hidden,
            parallel="row",
            skip_bias_add=True,
            layer_idx=layer_idx,
        )
        self.dropout = Dropout(options.attention_dropout_prob)
        self.output_dropout = Dropout(options.output_dropout_prob)
        self.fused_bias_dropout = bool(options.bias_dropout_fusion)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to the same, sbp [S(0), B]."""
        batch, time = x.shape[:2]
        qkv = self.query_key_value(x)
        if self.fused_attention and not is_active(self.dropout):
            # (heads, 3) to (3, heads). The operator keeps no weights, so nothing could drop out.
            parts = qkv.reshape(batch, time, self.num_heads, 3, self.head_size).transpose(2, 3)
            context = packed_attention(parts, self.num_heads, causal=True)
        else:
            context = self._composed(qkv)
        return bias_dropout(*self.dense(context), self.output_dropout, self.fused_bias_dropout)

    def _composed(self, qkv: flow.Tensor) -> flow.Tensor:
        batch, time = qkv.shape[:2]
        heads = qkv.reshape(batch, time, self.num_heads, 3 * self.head_size).permute(0, 2, 1, 3)
        query, key, value = flow.chunk(heads, chunks=3, dim=-1)
        factor = 1.0 / (math.sqrt(self.head_size) * self.layer_scale)
        scores = flow.matmul(query, key, transpose_b=True, alpha=factor)
        context = flow.matmul(self._weights(scores), value)
        return context.permute(0, 2, 1, 3).reshape(batch, time, self.num_heads * self.head_size)

    def _weights(self, scores: flow.Tensor) -> flow.Tensor:
        """Attention weights of the scores, (batch, heads, time, time), after dropout."""
        # What the product divided by has to come back, or the layers compute another function.
        scale = float(self.layer_scale)
        if not self.fused_softmax:
            return self.dropout(causal_softmax(scores, scale))
        if is_active(self.dropout):
            return fused_causal_softmax_dropout(scores, scale, self.dropout)
        seen = _causal_mask(scores)
        return flow._C.fused_scale_mask_softmax(scores, seen, fill_value=HIDDEN, scale=scale)


def _causal_mask(scores: flow.Tensor) -> flow.Tensor:
    """True where a row sees a column, (1, 1, rows, columns); made in the forward, as a graph must
    capture no free tensor."""
    rows, columns = scores.shape[-2:]
    sbp = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    place = {"dtype": flow.int32, "placement": scores.placement, "sbp": sbp}
    row = flow.arange(rows, **place).reshape(1, 1, rows, 1) + (columns - rows)
    return flow.arange(columns, **place).reshape(1, 1, 1, columns) <= row
