"""The parts of GPT-2 around attention: embeddings, feed-forward network, block and loss."""

from __future__ import annotations

import oneflow as flow
from libai.layers import (
    Dropout,
    Embedding,
    LayerNorm,
    ParallelCrossEntropyLoss,
    TransformerLayer,
    VocabEmbedding,
)
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.projects.MagicPrompt.attention import SelfAttention
from libai_projects.projects.MagicPrompt.dropout import bias_dropout
from libai_projects.projects.MagicPrompt.model_options import ACTIVATIONS, ModelOptions
from libai_projects.projects.MagicPrompt.projections import drawn_later, projection
from libai_projects.weights.monarch import INNER, OUTER


class GPT2Embedding(nn.Module):
    """Sum of token and position embedding, after dropout; on the first pipeline stage."""

    def __init__(self, options: ModelOptions) -> None:
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
        self.dropout = Dropout(options.embedding_dropout_prob)

    def forward(self, input_ids: flow.Tensor, token_weight: flow.Tensor) -> flow.Tensor:
        """Embed tokens.

        Args:
            input_ids: (batch, time) int64, sbp [S(0), B].
            token_weight: what `token_embeddings.read_weight()` gave for this forward pass; the
                logits use the same value.

        Returns:
            (batch, time, hidden), sbp [S(0), B].
        """
        tokens = self.token_embeddings(input_ids, token_weight)
        positions = self.position_embeddings(dist.get_position_ids(input_ids.shape[1]))
        return self.dropout(tokens + positions)


class FeedForward(nn.Module):
    """hidden -> ffn_hidden, GELU, -> hidden; column-, then row-parallel."""

    def __init__(self, options: ModelOptions, *, layer_idx: int) -> None:
        super().__init__()
        self.bias_gelu_fusion = bool(options.bias_gelu_fusion)
        self.approximate = ACTIVATIONS[options.activation]
        self.dense_h_to_4h = projection(
            options,
            INNER,
            options.hidden_size,
            options.ffn_hidden_size,
            parallel="col",
            skip_bias_add=self.bias_gelu_fusion,
            layer_idx=layer_idx,
        )
        self.dense_4h_to_h = projection(
            options,
            OUTER,
            options.ffn_hidden_size,
            options.hidden_size,
            parallel="row",
            skip_bias_add=True,
            layer_idx=layer_idx,
        )
        self.dropout = Dropout(options.output_dropout_prob)
        self.fused_bias_dropout = bool(options.bias_dropout_fusion)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to the same, sbp [S(0), B]."""
        if self.bias_gelu_fusion:
            product, bias = self.dense_h_to_4h(x)
            inner = flow._C.fused_bias_add_gelu(product, bias, axis=product.ndim - 1)
        else:
            inner = flow._C.gelu_with_approximate(self.dense_h_to_4h(x), self.approximate)
        return bias_dropout(*self.dense_4h_to_h(inner), self.dropout, self.fused_bias_dropout)


class Block(TransformerLayer):
    """x + Attention(LN(x)), then x + FeedForward(LN(x)).

    LiBai's graphs know a TransformerLayer as the unit of activation checkpointing, which is all
    that is inherited.
    """

    def __init__(self, options: ModelOptions, *, layer_idx: int) -> None:
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
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TokenLosses(nn.Module):
    """Cross entropy of each token in nats, on logits that may be split over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = ParallelCrossEntropyLoss()

    def forward(self, logits: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        """Losses and what counts of them.

        Args:
            logits: (batch, time, vocabulary), sbp [S(0), S(2)].
            labels: (batch, time) int64; a negative one does not count.

        Returns:
            losses (batch, time), 0 where they do not count, and a mask of the same shape and dtype,
            1 where they count; sbp [S(0), B].
        """
        labels = labels.to_global(placement=logits.placement)
        counted = self.cross_entropy.counted(labels)
        losses = self.cross_entropy(logits, labels)
        losses = losses.to_global(sbp=dist.get_hidden_sbp()).reshape(*labels.shape)
        return losses, counted.to(losses.dtype)
