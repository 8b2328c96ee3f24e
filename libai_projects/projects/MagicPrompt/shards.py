"""This process's part of the weights as local tensors, and one layer computed on it.

The same function as the modules of `gpt2.py`, which work on global tensors: here an operator is one
call, and nothing but the sums over tensor parallelism leaves the process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oneflow_accel.inference.huge_pages import use_huge_pages
from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.dropout import HIDDEN
from oneflow_accel.kernels.linear import linear

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.projects.MagicPrompt.cache import KeyValueCache
from libai_projects.projects.MagicPrompt.communication import Position
from libai_projects.projects.MagicPrompt.layers import Block
from libai_projects.projects.MagicPrompt.model_options import ACTIVATIONS, ModelOptions

BROADCAST, COLUMNS, ROWS = flow.sbp.broadcast, flow.sbp.split(1), flow.sbp.split(0)


def local(parameter: flow.Tensor, sbp: flow.sbp.sbp = BROADCAST) -> flow.Tensor:
    """This process's shard, split over tensor parallelism as `sbp` says.

    ZeRO may have left the parameter split in another way.
    """
    declared = dist.get_nd_sbp([flow.sbp.broadcast, sbp])
    value = parameter.detach()
    if not dist.same_sbp(value.sbp, declared):
        value = value.to_global(sbp=declared)
    return value.to_local()


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


@dataclass(frozen=True)
class Linear:
    """A linear layer's part on this process.

    Attributes:
        weight: (out, in), the other way round than the module's: so that one operator adds the bias
            and the residual to the product.
        bias: (out,).
    """

    weight: flow.Tensor
    bias: flow.Tensor

    @classmethod
    def of(cls, module: nn.Module, weight: flow.sbp.sbp, bias: flow.sbp.sbp) -> Linear:
        """The shard of a module whose parameters are split as `weight` and `bias` say."""
        transposed = local(module.weight, weight).transpose(0, 1).contiguous()
        use_huge_pages(transposed)
        return cls(transposed, local(module.bias, bias))

    def __call__(self, x: flow.Tensor, addend: flow.Tensor | None = None) -> flow.Tensor:
        """(batch, time, in) to (batch, time, out), added to `addend`."""
        return linear(x, self.weight, self.bias, addend)


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
        self.qkv = Linear.of(attention.query_key_value, COLUMNS, ROWS)
        self.dense = Linear.of(attention.dense, ROWS, BROADCAST)
        self.inner = Linear.of(mlp.dense_h_to_4h, COLUMNS, ROWS)
        self.outer = Linear.of(mlp.dense_4h_to_h, ROWS, BROADCAST)
        self.approximate = ACTIVATIONS[options.activation]
        self.head_size = options.head_size
        self.heads = options.num_attention_heads // len(position.group)
        self.scale = 1.0 / math.sqrt(self.head_size)
        self.position = position

    def __call__(
        self, x: flow.Tensor, layer: int, cache: KeyValueCache, hidden: Hidden | None
    ) -> flow.Tensor:
        """(batch, new, width) to the same, after the tokens in `cache`, which gets the new ones."""
        context = self._attend(self.input_norm(x), layer, cache, hidden)
        x = self._add_up(context, self.dense, x)
        inner = flow._C.gelu_with_approximate(self.inner(self.post_norm(x)), self.approximate)
        return self._add_up(inner, self.outer, x)

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

    def _add_up(self, x: flow.Tensor, linear: Linear, residual: flow.Tensor) -> flow.Tensor:
        """A row-parallel linear layer, each process having some of its inputs, and the residual."""
        if len(self.position.group) == 1:
            return linear(x, residual)
        part = flow._C.matmul(x, linear.weight, transpose_b=True)
        return residual + (self.position.sum(part) + linear.bias)
