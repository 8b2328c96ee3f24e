"""This process's part of the weights as local tensors, and one layer computed on it.

The same function as the modules of `gpt2.py`, which work on global tensors: here an operator is one
call, and nothing but the sums over tensor parallelism leaves the process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.decoder_layer import decoder_layer
from oneflow_accel.kernels.dropout import HIDDEN

import numpy as np
import oneflow as flow
from oneflow import nn

from libai_projects.projects.MagicPrompt.cache import KeyValueCache
from libai_projects.projects.MagicPrompt.communication import Position
from libai_projects.projects.MagicPrompt.layers import Block
from libai_projects.projects.MagicPrompt.linear_shards import (
    DenseColumn,
    DenseRow,
    column,
    local,
    row,
)
from libai_projects.projects.MagicPrompt.model_options import ACTIVATIONS, ModelOptions

_DENSE = (DenseColumn, DenseRow)


class Hidden:
    """Which tokens a step's queries see beyond the causal rule, ready for the operators.

    Args:
        mask: (batch, length) bool, False for padding.
        queries: how many of the last positions are asked for.
        device: where the tensors go.
        fused: whether softmax takes truth values (the fused operator) or a sum.
    """

    def __init__(self, mask: np.ndarray, queries: int, device: flow.device, fused: bool) -> None:
        length = mask.shape[1]
        seen = np.tril(np.ones((queries, length), dtype=bool), length - queries)
        seen = mask[:, None, None, :] & seen
        self._fused = fused
        # Made on the host: not every device has tril and masked_fill.
        values = seen if fused else np.where(seen, 0.0, HIDDEN).astype(np.float32)
        self._tensor = flow.tensor(np.ascontiguousarray(values), device=device)

    def softmax(self, scores: flow.Tensor, scale: float) -> flow.Tensor:
        """(batch, heads, queries, length) scores to weights."""
        if self._fused:
            return flow._C.fused_scale_mask_softmax(
                scores, self._tensor, fill_value=HIDDEN, scale=scale
            )
        return flow.softmax(scores * scale + self._tensor, dim=-1)


@dataclass(frozen=True)
class Norm:
    """Layer normalization over the last axis."""

    weight: flow.Tensor
    bias: flow.Tensor
    epsilon: float

    @classmethod
    def of(cls, module: nn.Module) -> Norm:
        return cls(local(module.weight), local(module.bias), module.eps)

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        shape = self.weight.shape
        return flow.nn.functional.layer_norm(x, shape, self.weight, self.bias, self.epsilon)


class LayerShard:
    """One block's weights on this process.

    Args:
        block: the global module.
        options: of the model.
        position: of this process.
    """

    def __init__(self, block: Block, options: ModelOptions, position: Position) -> None:
        attention, mlp = block.self_attention, block.mlp
        self.input_norm = Norm.of(block.input_layernorm)
        self.post_norm = Norm.of(block.post_attention_layernorm)
        self.qkv = column(attention.query_key_value, position)
        self.dense = row(attention.dense, position)
        self.inner = column(mlp.dense_h_to_4h, position)
        self.outer = row(mlp.dense_4h_to_h, position)
        self.approximate = ACTIVATIONS[options.activation]
        self.head_size = options.head_size
        self.heads = options.num_attention_heads // len(position.group)
        self.scale = 1.0 / math.sqrt(self.head_size)
        # A whole layer of dense weights takes a token in one operation.
        linears = (self.qkv, self.dense, self.inner, self.outer)
        self._weights: list[flow.Tensor] | None = None
        if len(position.group) == 1 and all(isinstance(x, _DENSE) for x in linears):
            parts = (self.input_norm, *linears[:2], self.post_norm, *linears[2:])
            self._weights = [tensor for part in parts for tensor in (part.weight, part.bias)]
            self._settings = {
                "scale": self.scale,
                "epsilon": self.input_norm.epsilon,
                "tanh": self.approximate == "tanh",
            }

    def __call__(
        self, x: flow.Tensor, layer: int, cache: KeyValueCache, hidden: Hidden | None
    ) -> flow.Tensor:
        """(batch, new, width) to the same, after the tokens in `cache`, which gets the new ones."""
        held = cache.held(layer)
        if self._weights is not None and held is not None and hidden is None and x.shape[1] == 1:
            x, key, value = decoder_layer(x, *held, *self._weights, **self._settings)
            cache.replace(layer, key, value)
            return x
        context = self._attend(self.input_norm(x), layer, cache, hidden)
        x = self.dense(context, x)
        inner = flow._C.gelu_with_approximate(self.inner(self.post_norm(x)), self.approximate)
        return self.outer(inner, x)

    def _attend(
        self, x: flow.Tensor, layer: int, cache: KeyValueCache, hidden: Hidden | None
    ) -> flow.Tensor:
        batch, time = x.shape[:2]
        qkv = self.qkv(x)
        # Of one token, moving the heads forward moves no numbers.
        if time == 1:
            qkv = qkv.reshape(batch, self.heads, 1, 3 * self.head_size)
        else:
            qkv = qkv.reshape(batch, time, self.heads, 3 * self.head_size).permute(0, 2, 1, 3)
        query, key, value = flow._C.chunk(qkv, 3, 3)
        key, value = cache.extend(layer, key, value)
        if hidden is None:
            context = scaled_dot_product_attention(
                query, key, value, causal=time > 1, scale=self.scale
            )
        else:
            scores = flow._C.matmul(query, key, transpose_b=True)
            context = flow._C.matmul(hidden.softmax(scores, self.scale), value)
        if time > 1:
            context = context.permute(0, 2, 1, 3)
        return context.reshape(batch, time, self.heads * self.head_size)
