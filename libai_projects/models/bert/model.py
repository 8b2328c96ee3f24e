"""BERT (Devlin et al. 2019) on LiBai's parallel layers, for pretraining.

Norms come after the residual, as in the paper and in transformers. LiBai 0.1.1's own BERT has them
before each branch, which is another function; its layers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from oneflow_accel.distributed import set_value

import oneflow as flow
from libai.layers import Embedding, LayerNorm, Linear, LMLogits, TransformerLayer, VocabEmbedding
from libai.utils import distributed as dist
from oneflow import nn

from flow_train.config.keys import Amount, Positive
from libai_projects.models.gpt2 import options as model_options
from libai_projects.models.gpt2.model import FeedForward, SelfAttention, TokenLosses
from libai_projects.models.gpt2.options import ACTIVATIONS, GPT2Options
from libai_projects.models.layers import (
    column_linear,
    drawn_later,
    require_positions,
    set_stages,
    without_padding,
)
from libai_projects.weights.bert import BERT
from libai_projects.weights.table import initial_weights


class BertOptions(GPT2Options, frozen=True):
    """GPT-2's options with BERT's defaults. `num_tokentypes` are the kinds of sentences, of which
    a pair has two; with `masked_lm_only` there is no head for the order of sentences."""

    causal: ClassVar[bool] = False

    num_tokentypes: Positive = 2
    masked_lm_only: bool = False
    layernorm_epsilon: Amount = 1e-12
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu"
    use_scaled_init_for_output_weights: bool = False


class BertEmbedding(nn.Module):
    """Norm of the sum of token, position and token type embedding, after dropout; on the first
    pipeline stage."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        hidden = options.hidden_size
        given = {"init_method": drawn_later, "amp_enabled": options.amp_enabled}
        self.token_embeddings = VocabEmbedding(options.vocab_size, hidden, **given)
        self.position_embeddings = Embedding(options.max_seq_length, hidden, **given)
        self.tokentype_embeddings = Embedding(options.num_tokentypes, hidden, **given)
        self.layernorm = LayerNorm(hidden, eps=options.layernorm_epsilon, layer_idx=0)
        self.dropout = nn.Dropout(options.embedding_dropout_prob)

    def forward(
        self, input_ids: flow.Tensor, tokentype_ids: flow.Tensor | None = None
    ) -> flow.Tensor:
        """Embed two of (batch, time) int64, sbp [S(0), B], as (batch, time, hidden), same sbp."""
        whole = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
        place = {"placement": dist.get_layer_placement(0), "sbp": whole}
        positions = flow.arange(input_ids.shape[1], dtype=flow.long, **place).unsqueeze(0)
        if tokentype_ids is None:
            tokentype_ids = positions * 0
        embedded = self.token_embeddings(input_ids) + self.position_embeddings(positions)
        embedded = embedded + self.tokentype_embeddings(tokentype_ids)
        return self.dropout(self.layernorm(embedded))


class BertBlock(TransformerLayer):
    """x = LN(x + Attention(x)), then LN(x + FeedForward(x)); LiBai's graphs know a
    TransformerLayer as the unit of activation checkpointing."""

    def __init__(self, options: BertOptions, *, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.layer_idx = layer_idx
        hidden, epsilon = options.hidden_size, options.layernorm_epsilon
        self.self_attention = SelfAttention(options, layer_idx=layer_idx)
        self.attention_layernorm = LayerNorm(hidden, eps=epsilon, layer_idx=layer_idx)
        self.mlp = FeedForward(options, layer_idx=layer_idx)
        self.output_layernorm = LayerNorm(hidden, eps=epsilon, layer_idx=layer_idx)

    def forward(self, x: flow.Tensor, segments: flow.Tensor | None = None) -> flow.Tensor:
        """(batch, time, hidden) to the same on the layer's stage, sbp [S(0), B]; a token sees those
        with its number in `segments` (batch, time) int64."""
        stage = dist.get_layer_placement(self.layer_idx)
        x = x.to_global(placement=stage)
        if segments is not None:
            segments = segments.to_global(placement=stage)
        x = self.attention_layernorm(self.self_attention(x, x, segments))
        return self.output_layernorm(self.mlp(x, x))


class MaskedHead(nn.Module):
    """The hidden states of all positions to what logits are made of: dense, GELU, norm; on the last
    stage."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        hidden = options.hidden_size
        self.dense = column_linear(None, hidden, hidden, layer_idx=-1)
        self.layernorm = LayerNorm(hidden, eps=options.layernorm_epsilon, layer_idx=-1)
        self.approximate = ACTIVATIONS[options.activation]

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to the same, sbp [S(0), B]."""
        x = self.dense(x)
        if self.approximate is None:
            x = flow.relu(x)
        else:
            x = flow._C.gelu_with_approximate(x, self.approximate)
        return self.layernorm(x.to_global(sbp=dist.get_hidden_sbp()))


class OrderHead(nn.Module):
    """The first position's hidden state to two logits: whether the second sentence follows the
    first, or the other way round; on the last stage."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        hidden = options.hidden_size
        self.pooler = column_linear(None, hidden, hidden, layer_idx=-1)
        given = {"parallel": "row", "init_method": drawn_later, "layer_idx": -1}
        self.seq_relationship = Linear(hidden, 2, **given)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to (batch, 1, 2), sbp [S(0), B]."""
        return self.seq_relationship(flow.tanh(self.pooler(x.narrow(1, 0, 1))))


def _hits(scores: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
    """1 where none of (batch, time, classes), which may be split, exceeds the label's, else 0."""
    whole = scores.to_global(sbp=dist.get_hidden_sbp())
    # Not argmax, whose threads a forked process lacks, and waits for.
    places = flow.clamp(labels.to_global(placement=whole.placement), min=0).unsqueeze(-1)
    return (flow.gather(whole, -1, places).squeeze(-1) >= flow.amax(whole, dim=-1)).to(whole.dtype)


class BertPretrainingModel(nn.Module):
    """BERT with its heads and losses, as LiBai's trainer and evaluation call it. The weights depend
    on the seed of OneFlow's default generator and their names only, so that they are the same in
    every layout. A wrong option or layout is a UserError."""

    returns_token_losses = True
    """Tells LiBai's (patched) evaluation to pass labels and take losses of single tokens."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        options = model_options.from_config(cfg, dist.get_tensor_parallel_size(), BertOptions)
        self.options = options
        self.embeddings = BertEmbedding(options)
        self.layers = nn.ModuleList(
            [BertBlock(options, layer_idx=index) for index in range(options.num_layers)]
        )
        self.masked_head = MaskedHead(options)
        self.logits = LMLogits(options.vocab_size, bias=True)
        if not options.masked_lm_only:
            self.order_head = OrderHead(options)
        self.loss_func = TokenLosses()
        parameters = dict(self.named_parameters())
        for name, array in initial_weights(BERT, vars(options), flow.initial_seed()):
            set_value(parameters[name], array)

    def forward(
        self,
        input_ids: flow.Tensor,
        labels: flow.Tensor | None = None,
        attention_mask: flow.Tensor | None = None,
        tokentype_ids: flow.Tensor | None = None,
        ns_labels: flow.Tensor | None = None,
    ) -> dict[str, flow.Tensor]:
        """Tokens to losses, or without `labels` to {"prediction_scores": (batch, time, vocabulary),
        "seq_relationship_score": (batch, 2)}, the latter of a model that has it.

        All are int64 (batch, time), sbp [S(0), B], but `ns_labels` (batch,). `labels` are the
        tokens at masked places, negative elsewhere; `attention_mask` is 1 at tokens and, after
        them, 0 at padding; `tokentype_ids` tells the first sentence from the second; `ns_labels`
        are 1 where they were exchanged (Lan et al. 2020). In training the result is {"lm_loss",
        "sop_loss"}, else what `loss_of_tokens` gives of the masked ones, with "token_hits" (1 where
        no score exceeds the label's), shaped alike, and "order_hits" (batch, 1). More
        tokens than positions are a UserError.
        """
        require_positions(input_ids.shape[1], self.options.max_seq_length)
        # Padding sees padding only, and nothing sees it.
        segments = None if attention_mask is None else 1 - attention_mask
        x = self.embeddings(input_ids, tokentype_ids)
        for layer in self.layers:
            x = layer(x, segments)
        logits = self.logits(self.masked_head(x), self.embeddings.token_embeddings.weight)
        logits = without_padding(logits, self.options.real_vocabulary)
        has_order = not self.options.masked_lm_only
        if labels is None:
            found = {"prediction_scores": logits}
            if has_order:
                found["seq_relationship_score"] = self.order_head(x).squeeze(1)
            return found
        losses = self.loss_func(logits, labels)
        order = self.order_head(x) if has_order and ns_labels is not None else None
        if not self.training:
            losses["token_hits"] = _hits(logits, labels)
            if order is not None:
                losses["order_hits"] = _hits(order, ns_labels.unsqueeze(1))
        elif order is not None:
            losses["sop_loss"] = self.loss_func(order, ns_labels.unsqueeze(1))["lm_loss"]
        return losses

    @staticmethod
    def set_pipeline_stage_id(model: nn.Module) -> None:
        last = (LMLogits, OrderHead, TokenLosses)
        set_stages(model, BertEmbedding, model.masked_head, last)
