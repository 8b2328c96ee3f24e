"""GPT-2 (Radford et al. 2019) on LiBai's parallel layers, for training, evaluation and generation.

Parameter names and shapes are those of LiBai 0.1.1's GPT, so that its checkpoints load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.distributed import set_value
from oneflow_accel.kernels.attention import (
    can_drop_weights,
    draw_seed,
    packed_attention,
)

import numpy as np
import oneflow as flow
from libai.layers import (
    Embedding,
    LayerNorm,
    LMLogits,
    ParallelCrossEntropyLoss,
    TransformerLayer,
    VocabEmbedding,
)
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.models.decoder import LinearLayer, LocalLayers, embedded
from libai_projects.models.gpt2 import options as model_options
from libai_projects.models.gpt2.options import ACTIVATIONS, GPT2Options
from libai_projects.models.layers import (
    Head,
    QueryKeyValue,
    causal_attention,
    column_linear,
    drawn_later,
    is_active,
    loss_of_tokens,
    merge_heads,
    require_positions,
    row_linear,
    segment_attention,
    set_stages,
    split_heads,
    without_padding,
)
from libai_projects.models.processes import local
from libai_projects.models.step_model import StepModel
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.monarch import DENSE, INNER, OUTER, QKV, QKV_PARTS
from libai_projects.weights.table import initial_weights


class GPT2Embedding(nn.Module):
    """Sum of token and position embedding, after dropout; on the first pipeline stage."""

    def __init__(self, options: GPT2Options) -> None:
        super().__init__()
        self.token_embeddings = VocabEmbedding(
            options.vocab_size,
            options.hidden_size,
            init_method=drawn_later,
            amp_enabled=options.amp_enabled,
        )
        self.position_embeddings = Embedding(
            options.max_seq_length,
            options.hidden_size,
            init_method=drawn_later,
            amp_enabled=options.amp_enabled,
        )
        self.dropout = nn.Dropout(options.embedding_dropout_prob)

    def forward(self, input_ids: flow.Tensor) -> flow.Tensor:
        """Embed (batch, time) int64, sbp [S(0), B], as (batch, time, hidden), same sbp."""
        tokens = self.token_embeddings(input_ids)
        # Made here, as a graph must not capture a free tensor.
        whole = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
        place = {"placement": dist.get_layer_placement(0), "sbp": whole}
        positions = flow.arange(input_ids.shape[1], dtype=flow.long, **place).unsqueeze(0)
        return self.dropout(tokens + self.position_embeddings(positions))


def _end_of_branch(options: GPT2Options, part: str, in_features: int, layer_idx: int) -> nn.Module:
    return row_linear(
        options.monarch_layers().get(part),
        in_features,
        options.hidden_size,
        dropout=options.output_dropout_prob,
        fused=bool(options.bias_dropout_fusion),
        layer_idx=layer_idx,
    )


class SelfAttention(nn.Module):
    """Attention of each head with its projections, added to the residual. Queries, keys and
    values are interleaved by head, (heads, 3, head_size), so that a split of that axis keeps
    heads whole."""

    def __init__(self, options: GPT2Options, *, layer_idx: int) -> None:
        super().__init__()
        hidden, parts = options.hidden_size, options.monarch_layers()
        self.num_heads, self.head_size = options.num_attention_heads, options.head_size
        self.causal = options.causal
        self.fused_attention = bool(options.attention_fusion)
        self.fused_softmax = bool(options.scale_mask_softmax_fusion)
        self.scale = options.scale_of(layer_idx)
        self.layer_scale = layer_idx + 1 if options.apply_query_key_layer_scaling else 1
        if QKV in parts:
            self.query_key_value = QueryKeyValue(
                parts[QKV], hidden, self.head_size, layer_idx=layer_idx
            )
        else:
            self.query_key_value = column_linear(None, hidden, 3 * hidden, layer_idx=layer_idx)
        self.dense = _end_of_branch(options, DENSE, hidden, layer_idx)
        self.dropout = nn.Dropout(options.attention_dropout_prob)

    def forward(
        self, x: flow.Tensor, residual: flow.Tensor, segments: flow.Tensor | None = None
    ) -> flow.Tensor:
        """Two of (batch, time, hidden) to the same, sbp [S(0), B]. Where attention is not causal, a
        token sees those with its number in `segments` (batch, time)."""
        qkv = self.query_key_value(x)
        dropped = is_active(self.dropout)
        if self.fused_attention and (not dropped or can_drop_weights(qkv)):
            # (heads, 3) to (3, heads).
            packed = (*qkv.shape[:2], self.num_heads, 3, self.head_size)
            parts = qkv.reshape(*packed).transpose(2, 3)
            given: dict[str, Any] = {"causal": self.causal, "scale": self.scale}
            if dropped:
                given |= {"dropout": self.dropout.p, "seed": draw_seed(qkv)}
            context = packed_attention(parts, self.num_heads, segments=segments, **given)
            return self.dense(context, residual)
        query, key, value = flow._C.chunk(split_heads(qkv, 3 * self.head_size), 3, 3)
        scales = {"scale": self.scale, "layer_scale": self.layer_scale}
        if self.causal:
            context = causal_attention(
                query, key, value, self.dropout, fused=self.fused_softmax, **scales
            )
        else:
            context = segment_attention(query, key, value, segments, self.dropout, **scales)
        return self.dense(merge_heads(context), residual)


class FeedForward(nn.Module):
    """hidden -> ffn_hidden, GELU or ReLU, -> hidden, added to the residual."""

    def __init__(self, options: GPT2Options, *, layer_idx: int) -> None:
        super().__init__()
        hidden, inner = options.hidden_size, options.ffn_hidden_size
        self.approximate = ACTIVATIONS[options.activation]
        self.dense_h_to_4h = column_linear(
            options.monarch_layers().get(INNER),
            hidden,
            inner,
            skip_bias_add=bool(options.bias_gelu_fusion),
            layer_idx=layer_idx,
        )
        self.dense_4h_to_h = _end_of_branch(options, OUTER, inner, layer_idx)

    def forward(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        """Two of (batch, time, hidden) to the same, sbp [S(0), B]."""
        inner = self.dense_h_to_4h(x)
        if isinstance(inner, tuple):
            product, bias = inner
            inner = flow._C.fused_bias_add_gelu(product, bias, axis=product.ndim - 1)
        elif self.approximate is None:
            inner = flow.relu(inner)
        else:
            inner = flow._C.gelu_with_approximate(inner, self.approximate)
        return self.dense_4h_to_h(inner, residual)


class Block(TransformerLayer):
    """x + Attention(LN(x)), then x + FeedForward(LN(x)); LiBai's graphs know a TransformerLayer as
    the unit of activation checkpointing."""

    def __init__(self, options: GPT2Options, *, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.layer_idx = layer_idx
        hidden, epsilon = options.hidden_size, options.layernorm_epsilon
        self.input_layernorm = LayerNorm(hidden, eps=epsilon, layer_idx=layer_idx)
        self.self_attention = SelfAttention(options, layer_idx=layer_idx)
        self.post_attention_layernorm = LayerNorm(hidden, eps=epsilon, layer_idx=layer_idx)
        self.mlp = FeedForward(options, layer_idx=layer_idx)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to the same on the layer's stage, sbp [S(0), B]."""
        x = x.to_global(placement=dist.get_layer_placement(self.layer_idx))
        x = self.self_attention(self.input_layernorm(x), x)
        return self.mlp(self.post_attention_layernorm(x), x)


class Transformer(nn.Module):
    """The blocks and the last layer norm, each on its pipeline stage."""

    def __init__(self, options: GPT2Options) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Block(options, layer_idx=index) for index in range(options.num_layers)]
        )
        self.layernorm_f = LayerNorm(
            options.hidden_size, eps=options.layernorm_epsilon, layer_idx=-1
        )

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to the same on the last stage."""
        for layer in self.layers:
            x = layer(x)
        return self.layernorm_f(x)


class GPT2Model(nn.Module):
    """Tokens to logits. The weights depend on the seed of OneFlow's default generator and their
    names only, so that they are the same in every layout. A wrong option or layout is a
    UserError."""

    def __init__(self, cfg: Mapping[str, Any] | GPT2Options) -> None:
        super().__init__()
        if not isinstance(cfg, GPT2Options):
            cfg = model_options.from_config(cfg, dist.get_tensor_parallel_size())
        self.options = cfg
        self.embeddings = GPT2Embedding(cfg)
        self.transformer = Transformer(cfg)
        self.logits = LMLogits(cfg.vocab_size, bias=False)
        if not cfg.tie_word_embeddings:
            self.lm_head = Head(cfg.vocab_size, cfg.hidden_size)
        parameters = dict(self.named_parameters())
        for name, array in initial_weights(GPT2, vars(cfg), flow.initial_seed()):
            set_value(parameters[name.removeprefix(GPT2.prefix)], array)

    @property
    def layers(self) -> nn.ModuleList:
        return self.transformer.layers

    @property
    def norm(self) -> nn.Module:
        return self.transformer.layernorm_f

    def head_weight(self) -> flow.Tensor:
        """(vocab_size, hidden), what makes logits of the last norm's output."""
        tied = self.options.tie_word_embeddings
        return self.embeddings.token_embeddings.weight if tied else self.lm_head.weight

    def forward(self, input_ids: flow.Tensor) -> flow.Tensor:
        """(batch, time) int64 on the first stage, sbp [S(0), B], to logits of every position.

        They are (batch, time, vocab_size) on the last stage, sbp [S(0), S(2)]; softmax makes those
        of padding rows of the vocabulary 0. More tokens than positions are a UserError.
        """
        require_positions(input_ids.shape[1], self.options.max_seq_length)
        hidden = self.transformer(self.embeddings(input_ids))
        logits = self.logits(hidden, self.head_weight())
        return without_padding(logits, self.options.real_vocabulary)


class TokenLosses(nn.Module):
    """Cross entropy of each token in nats, on logits that may be split over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = ParallelCrossEntropyLoss()

    def forward(self, logits: flow.Tensor, labels: flow.Tensor) -> dict[str, flow.Tensor]:
        """See `loss_of_tokens`. `logits` are (batch, time, vocabulary), sbp [S(0), S(2)]; `labels`
        (batch, time) int64, of which a negative one does not count and has the loss 0."""
        labels = labels.to_global(placement=logits.placement)
        losses = self.cross_entropy(logits, labels)
        return loss_of_tokens(losses, self.cross_entropy.counted(labels), labels, self.training)


class GPT2ForPreTraining(nn.Module):
    """GPT2Model with its loss, as LiBai's trainer and evaluation call it."""

    returns_token_losses = True
    """Tells LiBai's (patched) evaluation to pass labels and take losses of single tokens."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.GPT_model = GPT2Model(cfg)
        self.loss_func = TokenLosses()

    def forward(
        self, input_ids: flow.Tensor, labels: flow.Tensor | None = None
    ) -> dict[str, flow.Tensor]:
        """(batch, time) int64 ids and labels, the token after each (negative: does not count), to
        what `loss_of_tokens` gives; without labels {"prediction_scores": logits}."""
        logits = self.GPT_model(input_ids)
        return {"prediction_scores": logits} if labels is None else self.loss_func(logits, labels)

    @staticmethod
    def set_pipeline_stage_id(model: nn.Module) -> None:
        norm = model.GPT_model.transformer.layernorm_f
        set_stages(model, GPT2Embedding, norm, (LMLogits, Head, TokenLosses))


class GPT2StepModel(StepModel):
    """A GPT-2 that generation can step through. Its weights are read now: load them before; the
    dtypes are `StepModel`'s."""

    def __init__(self, model: GPT2ForPreTraining | GPT2Model, **dtypes: Any) -> None:
        gpt = model.GPT_model if isinstance(model, GPT2ForPreTraining) else model
        super().__init__(gpt, **dtypes)
        self._tokens = local(gpt.embeddings.token_embeddings.weight)
        self._positions = local(gpt.embeddings.position_embeddings.weight)

    def _embed(self, ids: np.ndarray, positions: np.ndarray) -> flow.Tensor:
        return embedded(self._tokens, ids) + embedded(self._positions, positions)

    def _products(self, block: Block, make: LocalLayers) -> list[LinearLayer]:
        attention, mlp, size = block.self_attention, block.mlp, self._options.head_size
        mixed = [attention.query_key_value]
        if isinstance(mixed[0], QueryKeyValue):
            mixed = [getattr(mixed[0], name) for name in QKV_PARTS]

        def by_part(x: np.ndarray) -> np.ndarray:
            # (heads, 3) to (3, heads).
            return x.reshape(-1, 3, size, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

        return [
            make.column(*mixed, order=by_part),
            make.row(attention.dense),
            make.column(mlp.dense_h_to_4h, activation=self._options.activation),
            make.row(mlp.dense_4h_to_h),
        ]
