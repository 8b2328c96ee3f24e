"""Llama (Touvron et al. 2023) on LiBai's parallel layers, for training, evaluation and generation.

A block gives its branch and the residual apart, and the next norm adds them, so that one operation
adds, normalizes and keeps the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oneflow_accel.distributed import set_value
from oneflow_accel.kernels.attention import draw_seed, scaled_dot_product_attention
from oneflow_accel.kernels.loss import linear_cross_entropy, linear_cross_entropy_mean
from oneflow_accel.kernels.transformer import add_rms_norm, rms_norm, rope, swiglu

import numpy as np
import oneflow as flow
from libai.layers import (
    LayerNorm,
    Linear,
    ParallelCrossEntropyLoss,
    TransformerLayer,
    VocabEmbedding,
)
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.models.decoder import LinearLayer, LocalLayers, embedded
from libai_projects.models.layers import (
    Head,
    Pair,
    drawn_later,
    is_active,
    loss_of_tokens,
    require_positions,
    set_stages,
    structured_linear,
    without_padding,
)
from libai_projects.models.llama import options as model_options
from libai_projects.models.llama.options import LlamaOptions
from libai_projects.models.pages import Step
from libai_projects.models.processes import local
from libai_projects.models.step_model import StepModel
from libai_projects.weights.llama import LLAMA
from libai_projects.weights.monarch import DENSE, INNER, OUTER, QKV
from libai_projects.weights.table import initial_weights

IGNORED = -100
"""A label that does not count."""


def _split(options: LlamaOptions) -> Any:
    """How activations lie between attention and feed-forward network."""
    batch, time = (1, 0) if options.sequence_first else (0, 1)
    over_tensor = flow.sbp.split(time) if options.sequence_parallel else flow.sbp.broadcast
    return dist.get_nd_sbp([flow.sbp.split(batch), over_tensor])


def _whole(x: flow.Tensor) -> flow.Tensor:
    """`x` before products with columns of weights: each process of tensor parallelism needs all of
    it, and its gradients are parts of a sum, which become one tensor again where `x` was one."""
    axes = len(x.sbp)
    if axes == 1 and not dist.get_dist_util().is_tensor_model_parallel():
        return x
    whole = (*x.sbp[:-1], flow.sbp.broadcast)
    # Where nothing changes on the way in, to_global does nothing on the way back either.
    return x.to_global(grad_sbp=x.sbp) if whole == tuple(x.sbp) else x.to_global(sbp=whole)


class ColumnLinear(Linear):
    """LiBai's Linear with parallel="col" of an input that `_whole` has gathered, so that layers
    with the same input share that."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(..., in_features) to (..., out_features), split over tensor parallelism."""
        y = flow._C.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class RowLinear(Linear):
    """LiBai's Linear with parallel="row", whose sum goes where the residual lies, as its attribute
    `sbp` says."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(..., in_features), split, to (..., out_features)."""
        y, sbp = flow._C.matmul(x, self.weight), self.sbp
        # All of a sum's gradient comes back: a product would have it moved as bfloat16 otherwise.
        summed = y.sbp[-1] == flow.sbp.partial_sum
        y = y.to_global(sbp=sbp, grad_sbp=(*y.sbp[:-1], flow.sbp.broadcast) if summed else None)
        return y if self.bias is None else y + self.bias


def _linear(
    options: LlamaOptions, role: str, inputs: int, outputs: int, layer_idx: int, bias: bool
) -> nn.Module:
    """The layer of a block with this role in `weights.monarch.layers`, which may be dense."""
    config, ends = options.monarch_layers().get(role), role in (OUTER, DENSE)
    parallel, sbp = ("row", _split(options)) if ends else ("col", None)
    place = {"parallel": parallel, "layer_idx": layer_idx, "bias": bias}
    if config is not None:
        return structured_linear(config, inputs, outputs, sbp=sbp, **place)
    kind = RowLinear if ends else ColumnLinear
    layer = kind(inputs, outputs, init_method=drawn_later, **place)
    layer.sbp = sbp
    return layer


class RMSNorm(LayerNorm):
    """Division by the root of the mean square, times a weight (Zhang and Sennrich 2019). It is a
    LayerNorm to LiBai, whose optimizer does not decay weights of norms."""

    def __init__(self, hidden_size: int, *, eps: float, dropout: float, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.eps, self.dropout, self.layer_idx = eps, dropout, layer_idx
        whole = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
        place = {"placement": dist.get_layer_placement(layer_idx), "sbp": whole}
        self.weight = nn.Parameter(flow.ones(hidden_size, **place))

    def forward(self, x: flow.Tensor, residual: flow.Tensor | None = None) -> Pair:
        """The norm of residual + dropout(x), (..., hidden), and that sum; of x where there is no
        residual."""
        weight = self.weight
        if residual is None:
            return rms_norm(x, weight, epsilon=self.eps), x
        drop = {}
        if self.training and self.dropout > 0:
            drop = {"dropout": self.dropout, "seed": draw_seed(x)}
        if x.dtype == residual.dtype:
            return add_rms_norm(x, residual, weight, epsilon=self.eps, **drop)
        # The residual is wider: what is normalized goes on in the dtype of the products.
        wide = x.to(residual.dtype)
        y, total = add_rms_norm(wide, residual, weight, epsilon=self.eps, **drop)
        return y.to(x.dtype), total

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class SelfAttention(nn.Module):
    """Attention whose heads may share keys and values, with rotary position embedding."""

    def __init__(self, options: LlamaOptions, *, layer_idx: int) -> None:
        super().__init__()
        hidden, size, bias = options.hidden_size, options.head_size, options.attention_bias
        self.head_size, self.interleaved = size, options.rope_interleaved
        self.scale = 1.0 / math.sqrt(size)
        self.time_axis = 0 if options.sequence_first else 1
        queries, keys = options.num_attention_heads * size, options.num_key_value_heads * size
        self.q_proj = _linear(options, QKV, hidden, queries, layer_idx, bias)
        self.k_proj = _linear(options, QKV, hidden, keys, layer_idx, bias)
        self.v_proj = _linear(options, QKV, hidden, keys, layer_idx, bias)
        self.o_proj = _linear(options, DENSE, queries, hidden, layer_idx, bias)
        self.dropout = nn.Dropout(options.attention_dropout_prob)

    def forward(
        self,
        x: flow.Tensor,
        angles: Pair,
        segments: flow.Tensor | None = None,
    ) -> flow.Tensor:
        """(batch, time, hidden) to the same, or with the first two axes exchanged; `angles` are
        cosines and sines of (time, head size / 2), `segments` (batch, time) numbers of documents,
        which do not see each other."""
        axis, x = self.time_axis, _whole(x)
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.head_size)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (
            rope(each, *angles, axis=axis, interleaved=self.interleaved) for each in (query, key)
        )
        # To (batch, heads, time, head size).
        order = (1, 2, 0, 3) if axis == 0 else (0, 2, 1, 3)
        query, key, value = (each.permute(*order) for each in (query, key, value))
        drop: dict[str, Any] = {}
        if is_active(self.dropout):
            drop = {"dropout": self.dropout.p, "seed": draw_seed(query)}
        if segments is not None:
            drop["segments"] = segments
        context = scaled_dot_product_attention(query, key, value, causal=True, **drop)
        context = context.permute(2, 0, 1, 3) if axis == 0 else context.permute(0, 2, 1, 3)
        return self.o_proj(context.reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """W_down (silu(W_gate x) W_up x) (Shazeer 2020, "GLU variants improve transformer")."""

    def __init__(self, options: LlamaOptions, *, layer_idx: int) -> None:
        super().__init__()
        hidden, inner, bias = options.hidden_size, options.ffn_hidden_size, options.mlp_bias
        self.gate_proj = _linear(options, INNER, hidden, inner, layer_idx, bias)
        self.up_proj = _linear(options, INNER, hidden, inner, layer_idx, bias)
        self.down_proj = _linear(options, OUTER, inner, hidden, layer_idx, bias)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(..., hidden) to the same."""
        x = _whole(x)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(TransformerLayer):
    """Norm and attention, norm and feed-forward network; LiBai's graphs know a TransformerLayer as
    the unit of activation checkpointing."""

    def __init__(self, options: LlamaOptions, *, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.layer_idx, self.residual_in_fp32 = layer_idx, options.residual_in_fp32
        norm = {"eps": options.rms_norm_epsilon, "dropout": options.output_dropout_prob}
        hidden = options.hidden_size
        self.input_layernorm = RMSNorm(hidden, **norm, layer_idx=layer_idx)
        self.self_attention = SelfAttention(options, layer_idx=layer_idx)
        self.post_attention_layernorm = RMSNorm(hidden, **norm, layer_idx=layer_idx)
        self.mlp = FeedForward(options, layer_idx=layer_idx)

    def forward(
        self,
        x: flow.Tensor,
        residual: flow.Tensor | None,
        cosines: flow.Tensor,
        sines: flow.Tensor,
        segments: flow.Tensor | None = None,
    ) -> Pair:
        """A branch and the residual before it, (batch, time, hidden) each, to the next two; the
        first block gets embeddings and no residual."""
        stage = dist.get_layer_placement(self.layer_idx)
        x = x.to_global(placement=stage)
        if residual is not None:
            residual = residual.to_global(placement=stage)
        if segments is not None:
            segments = segments.to_global(placement=stage)
        x, residual = self.input_layernorm(x, residual)
        if self.residual_in_fp32:
            residual = residual.to(flow.float32)
        x = self.self_attention(x, (cosines, sines), segments)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Tokens to the last norm's output, and the weight that makes logits of it. The weights depend
    on the seed of OneFlow's default generator and their names only, so that they are the same in
    every layout. A wrong option or layout is a UserError."""

    def __init__(self, cfg: Mapping[str, Any] | LlamaOptions) -> None:
        super().__init__()
        if not isinstance(cfg, LlamaOptions):
            cfg = model_options.from_config(cfg, dist.get_tensor_parallel_size())
        self.options = cfg
        self.rotary = cfg.rotary
        self.token_embeddings = VocabEmbedding(
            cfg.vocab_size, cfg.hidden_size, init_method=drawn_later, amp_enabled=cfg.amp_enabled
        )
        self.dropout = nn.Dropout(cfg.embedding_dropout_prob)
        self.layers = nn.ModuleList([Block(cfg, layer_idx=i) for i in range(cfg.num_layers)])
        self.norm = RMSNorm(
            cfg.hidden_size, eps=cfg.rms_norm_epsilon, dropout=cfg.output_dropout_prob, layer_idx=-1
        )
        if not cfg.tie_word_embeddings:
            self.lm_head = Head(cfg.vocab_size, cfg.hidden_size)
        # As buffers, since a graph must not capture a free tensor, and on every stage, since it
        # must not send a variable to another process.
        stages = [layer for layer in range(cfg.num_layers) if self._begins_stage(layer)]
        for layer in stages:
            for name, table in zip(
                self._names(layer), self._tables(cfg.max_seq_length, layer), strict=True
            ):
                self.register_buffer(name, table, persistent=False)
        parameters = dict(self.named_parameters())
        for name, array in initial_weights(LLAMA, vars(cfg), flow.initial_seed()):
            set_value(parameters[name.removeprefix(LLAMA.prefix)], array)

    def head_weight(self) -> flow.Tensor:
        """(vocab_size, hidden), what makes logits of the last norm's output."""
        tied = self.options.tie_word_embeddings
        return self.token_embeddings.weight if tied else self.lm_head.weight

    def forward(
        self, input_ids: flow.Tensor, segments: flow.Tensor | None = None
    ) -> tuple[flow.Tensor, flow.Tensor]:
        """(batch, time) int64 on the first stage, sbp [S(0), B], to (batch, time, hidden), with the
        same sbp, and (vocab_size, hidden), both on the last stage. More tokens than positions are a
        UserError."""
        options, time = self.options, input_ids.shape[1]
        require_positions(time, options.max_seq_length)
        x = self.dropout(self.token_embeddings(input_ids))
        if options.sequence_first:
            x = x.transpose(0, 1)
        x = x.to_global(sbp=_split(options))
        residual = None
        for index, layer in enumerate(self.layers):
            if self._begins_stage(index):
                angles = self._angles(time, index)
            x, residual = layer(x, residual, *angles, segments)
        x, _ = self.norm(x, residual)
        if options.sequence_first:
            x = x.transpose(0, 1)
        x = x.to_global(sbp=dist.get_hidden_sbp())
        return x, self.head_weight().to_global(placement=x.placement)

    def _angles(self, time: int, layer: int) -> Pair:
        """Cosines and sines (time, head size / 2) where `layer` is, the first of its stage."""
        longest = self.options.max_seq_length
        cosines, sines = (getattr(self, name) for name in self._names(layer))
        if time == longest:
            return cosines, sines
        if self.rotary.varies(longest):
            # These angles depend on the length.
            return self._tables(time, layer)
        return flow._C.narrow(cosines, 0, 0, time), flow._C.narrow(sines, 0, 0, time)

    def _tables(self, time: int, layer: int) -> Pair:
        whole = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
        place = {"placement": dist.get_layer_placement(layer), "sbp": whole}
        cosines, sines = self.rotary.tables(time)
        return flow.tensor(cosines, **place), flow.tensor(sines, **place)

    @staticmethod
    def _begins_stage(layer: int) -> bool:
        stage_of = dist.get_dist_util().get_layer_stage_id
        return layer == 0 or stage_of(layer) != stage_of(layer - 1)

    @staticmethod
    def _names(layer: int) -> tuple[str, str]:
        return f"cosines_{layer}", f"sines_{layer}"


class LlamaForPreTraining(nn.Module):
    """LlamaModel with its loss, as LiBai's trainer and evaluation call it."""

    returns_token_losses = True
    """Tells LiBai's (patched) evaluation to pass labels and take losses of single tokens."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.llama = LlamaModel(cfg)
        self.loss_func = TokenLosses(self.llama.options)

    def forward(
        self,
        input_ids: flow.Tensor,
        labels: flow.Tensor | None = None,
        segments: flow.Tensor | None = None,
    ) -> dict[str, flow.Tensor]:
        """(batch, time) int64 ids and labels, the token after each (negative: does not count), and
        numbers of documents, which do not see each other, to what `loss_of_tokens` gives; without
        labels {"prediction_scores": logits (batch, time, vocab_size)}."""
        hidden, head = self.llama(input_ids, segments)
        if labels is None:
            return {"prediction_scores": self.loss_func.logits(hidden, head)}
        return self.loss_func(hidden, head, labels)

    @staticmethod
    def set_pipeline_stage_id(model: nn.Module) -> None:
        set_stages(model, VocabEmbedding, model.llama.norm, (Head, TokenLosses))


class TokenLosses(nn.Module):
    """Cross entropy of each token in nats, without the logits where their columns are whole."""

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.vocab_size, self.real = options.vocab_size, options.real_vocabulary
        self.cross_entropy = ParallelCrossEntropyLoss()

    def forward(
        self, hidden: flow.Tensor, head: flow.Tensor, labels: flow.Tensor
    ) -> dict[str, flow.Tensor]:
        """Of (batch, time, hidden), (vocab_size, hidden) and (batch, time) int64."""
        labels = labels.to_global(placement=hidden.placement)
        whole = self.real == self.vocab_size and not dist.get_dist_util().is_tensor_model_parallel()
        if whole:
            rows = hidden.reshape(-1, hidden.shape[-1]), head, labels.reshape(-1)
            # With ZeRO a graph cannot place a gradient that the forward pass makes.
            if self.training and not (hidden.is_lazy and dist.get_world_size() > 1):
                return {"lm_loss": linear_cross_entropy_mean(*rows, ignore_index=IGNORED)}
            losses = linear_cross_entropy(*rows, ignore_index=IGNORED)
            counted = labels >= 0
        else:
            counted = self.cross_entropy.counted(labels)
            losses = self.cross_entropy(self.logits(hidden, head), labels)
        return loss_of_tokens(losses, counted, labels, self.training)

    def logits(self, hidden: flow.Tensor, head: flow.Tensor) -> flow.Tensor:
        """(batch, time, vocab_size), sbp [S(0), S(2)]; those of padding rows are far below 0."""
        logits = flow._C.matmul(hidden.to_global(grad_sbp=hidden.sbp), head, transpose_b=True)
        return without_padding(logits, self.real)


class LlamaStepModel(StepModel):
    """A Llama that generation can step through. Its weights are read now: load them before; the
    dtypes are `StepModel`'s."""

    def __init__(self, model: LlamaForPreTraining | LlamaModel, **dtypes: Any) -> None:
        llama = model.llama if isinstance(model, LlamaForPreTraining) else model
        self._rotary, longest = llama.rotary, llama.options.max_seq_length
        self.shares_prefixes = not self._rotary.varies(longest)
        # Up to the length from which on angles depend on it.
        settled = longest if self.shares_prefixes else self._rotary.original
        self._table = self._rotary.tables(settled)
        super().__init__(llama, **dtypes)
        self._tokens = local(llama.token_embeddings.weight)

    def _embed(self, ids: np.ndarray, positions: np.ndarray) -> flow.Tensor:
        return embedded(self._tokens, ids)

    def _products(self, block: Block, make: LocalLayers) -> list[LinearLayer]:
        attention, mlp = block.self_attention, block.mlp
        return [
            make.column(attention.q_proj, attention.k_proj, attention.v_proj),
            make.row(attention.o_proj),
            make.column(mlp.gate_proj, mlp.up_proj, gate=True),
            make.row(mlp.down_proj),
        ]

    def _angles(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        places = np.minimum(step.positions, len(self._table[0]) - 1)
        cosines, sines = (table[places] for table in self._table)
        for row in () if self.shares_prefixes else range(len(step.tables)):
            own = np.flatnonzero(step.sequences == row)
            first, last = step.positions[own[[0, -1]]].tolist()
            if self._rotary.varies(last + 1):
                cosines[own], sines[own] = self._rotary.tables(len(own), first=first)
        return cosines, sines
