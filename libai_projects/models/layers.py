"""What blocks are made of, on global tensors: dropout joined with what comes before it, causal
attention, and linear layers, LiBai's dense ones, Monarch or block-diagonal ones.

The fused operators of dropout draw their masks as the dropout operator does: right on one process
in eager mode, but under nn.Graph from one fixed seed, and on several processes not equal where a
tensor is broadcast. There `oneflow.rand` draws the mask, as in the patched nn.Dropout.

A linear layer made with parallel="col" takes whole inputs and gives outputs split over tensor
parallelism. One made with parallel="row" takes split inputs and ends a branch of the block: it gets
the residual too, and gives residual + dropout(product + bias), whole.
"""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.attention import (
    HIDDEN,
    causal_softmax,
    causal_softmax_mask_scale,
)
from oneflow_accel.kernels.linear import bias_mask_scale
from oneflow_accel.patching.runtime import draws_masks

import oneflow as flow
from libai.layers import Linear, TransformerLayer
from libai.utils import distributed as dist
from oneflow import nn
from oneflow.nn.graph import GraphModule

from libai_projects.weights.monarch import QKV_PARTS
from monarch_flow.layers import BlockdiagLinear, LinearConfig, MonarchLinear, StructuredLinear
from monarch_flow.parallel import (
    SPLIT,
    WHOLE,
    ParallelBlockdiagLinear,
    ParallelMonarchLinear,
)


def bias_dropout(
    x: flow.Tensor, bias: flow.Tensor, dropout: nn.Dropout, fused: bool
) -> flow.Tensor:
    """dropout(x + bias) of x (..., n), global, and bias (n,); with `fused` in one operator."""
    if not is_active(dropout):
        return x + bias
    if not fused:
        return dropout(x + bias)
    if draws_masks(x):
        return bias_mask_scale(x, bias, _keep_mask(x, dropout.p), 1 / (1 - dropout.p))
    return flow._C.fused_bias_add_dropout(x, bias, p=dropout.p, axis=x.ndim - 1)


def fused_causal_softmax_dropout(
    scores: flow.Tensor, scale: float, dropout: nn.Dropout
) -> flow.Tensor:
    """dropout(softmax(scale scores)) over the columns up to the row's, in one operator, of scores
    (batch, heads, time, time), global; `dropout` must be active."""
    p = dropout.p
    if draws_masks(scores):
        return causal_softmax_mask_scale(scores, _keep_mask(scores, p), scale, 1 / (1 - p))
    return flow._C.fused_scale_tril_softmax_mask_scale(
        scores, p=p, diagonal=0, tril_scale_value=scale, tril_fill_value=HIDDEN
    )[0]


def is_active(dropout: nn.Dropout) -> bool:
    """Whether it drops anything now."""
    return bool(dropout.training and dropout.p > 0)


def _keep_mask(x: flow.Tensor, p: float) -> flow.Tensor:
    """Truth values of the shape and layout of `x`, each False with probability `p`."""
    if not x.is_lazy:
        # Else it would overtake a dropout before it that waits for another process.
        flow._oneflow_internal.eager.Sync()
    return flow.rand(*x.shape, dtype=x.dtype, placement=x.placement, sbp=x.sbp) >= p


def require_positions(time: int, most: int) -> None:
    """A UserError for more tokens than positions."""
    if time > most:
        raise UserError(
            f"sequences of {time} tokens, but the model has {most} positions: shorten them, or "
            "train a model with a larger model.cfg.max_seq_length"
        )


def without_padding(logits: flow.Tensor, real: int) -> flow.Tensor:
    """Logits (..., vocabulary), sbp [S(0), S(2)], with those from `real` on far below 0: softmax
    makes padding rows of the vocabulary 0."""
    if real == logits.shape[-1]:
        return logits
    column = flow.arange(
        logits.shape[-1],
        dtype=flow.int32,
        placement=logits.placement,
        sbp=dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.split(0)]),
    )
    return logits + (column >= real).to(logits.dtype) * HIDDEN


def loss_of_tokens(
    losses: flow.Tensor, counted: flow.Tensor, labels: flow.Tensor, training: bool
) -> dict[str, flow.Tensor]:
    """What LiBai's trainer and evaluation take, of losses in nats and truth values where a token
    counts: in training {"lm_loss": mean over those}, else {"token_losses", "token_mask"}, shaped as
    `labels` (batch, time), sbp [S(0), B]."""
    losses = losses.to_global(sbp=dist.get_hidden_sbp()).reshape(*labels.shape)
    counted = counted.to(losses.dtype)
    if not training:
        return {"token_losses": losses, "token_mask": counted}
    # The sum over split labels is partial; partial by partial cannot be divided.
    count = counted.sum().to_global(sbp=dist.get_nd_sbp([flow.sbp.broadcast] * 2))
    # At least 1; not every device has clamp(min=...).
    return {"lm_loss": losses.sum() / (count + (count == 0.0).to(count.dtype))}


class Head(nn.Module):
    """The weight of the logits, split over the vocabulary, on the last stage, of a model that does
    not take the token embedding for it."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        over_rows = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.split(0)])
        place = {"placement": dist.get_layer_placement(-1), "sbp": over_rows}
        self.weight = nn.Parameter(flow.empty((vocab_size, hidden_size), **place))


def set_stages(model: nn.Module, first: type[nn.Module], norm: nn.Module, last: Any) -> None:
    """Say to LiBai's graphs on which pipeline stage each part is: those of type `first` are on the
    first one, blocks on their layer's, `norm` and those of types `last` on the last."""

    def set_stage(part: nn.Module, layer: int) -> None:
        stage = dist.get_dist_util().get_layer_stage_id(layer)
        part.to(GraphModule).set_stage(stage, dist.get_layer_placement(layer))

    for part in model.modules():
        module = part.to(nn.Module)
        if isinstance(module, first):
            set_stage(part, 0)
        elif isinstance(module, TransformerLayer):
            set_stage(part, module.layer_idx)
        elif isinstance(module, last):
            set_stage(part, -1)
    set_stage(norm, -1)


Pair = tuple[flow.Tensor, flow.Tensor]


def split_heads(x: flow.Tensor, size: int) -> flow.Tensor:
    """(batch, time, heads x size) to (batch, heads, time, size)."""
    batch, time, width = x.shape
    return x.reshape(batch, time, width // size, size).permute(0, 2, 1, 3)


def merge_heads(x: flow.Tensor) -> flow.Tensor:
    """(batch, heads, time, size) to (batch, time, heads x size)."""
    batch, heads, time, size = x.shape
    return x.permute(0, 2, 1, 3).reshape(batch, time, heads * size)


def causal_attention(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    dropout: nn.Dropout,
    *,
    fused: bool,
    scale: float,
    layer_scale: int = 1,
) -> flow.Tensor:
    """dropout(softmax(scale q k^T)) v, operator by operator (Vaswani et al. 2017).

    Tensors are (batch, heads, time, head size), global. With `fused` one operator scales, masks,
    normalizes and drops. The scores are divided by `layer_scale` inside the product and multiplied
    after it: the same function, for the range of half precision.
    """
    scores = flow.matmul(query, key, transpose_b=True, alpha=scale / layer_scale)
    back = float(layer_scale)
    if not fused:
        weights = dropout(causal_softmax(scores, back))
    elif is_active(dropout):
        weights = fused_causal_softmax_dropout(scores, back, dropout)
    else:
        seen = _causal_mask(scores)
        weights = flow._C.fused_scale_mask_softmax(scores, seen, fill_value=HIDDEN, scale=back)
    return flow.matmul(weights, value)


def segment_attention(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    segments: flow.Tensor | None,
    dropout: nn.Dropout,
    *,
    scale: float,
    layer_scale: int = 1,
) -> flow.Tensor:
    """As `causal_attention`, unfused, of tokens that see all with their number in `segments`
    (batch, time), or all."""
    scores = flow.matmul(query, key, transpose_b=True, alpha=scale / layer_scale) * layer_scale
    if segments is not None:
        batch, time = segments.shape
        others = segments.reshape(batch, 1, time, 1) != segments.reshape(batch, 1, 1, time)
        scores = scores + others.to(scores.dtype) * HIDDEN
    return flow.matmul(dropout(flow.softmax(scores, dim=-1)), value)


def _causal_mask(scores: flow.Tensor) -> flow.Tensor:
    """True where a row sees a column, (1, 1, rows, columns); made in the forward, as a graph must
    not capture a free tensor."""
    rows, columns = scores.shape[-2:]
    sbp = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    place = {"dtype": flow.int32, "placement": scores.placement, "sbp": sbp}
    row = flow.arange(rows, **place).reshape(1, 1, rows, 1) + (columns - rows)
    return flow.arange(columns, **place).reshape(1, 1, 1, columns) <= row


def drawn_later(tensor: flow.Tensor) -> flow.Tensor:
    """An initializer for LiBai's layers: the model draws its weights when it is whole, by name."""
    return tensor


def column_linear(
    config: LinearConfig | None,
    in_features: int,
    out_features: int,
    *,
    skip_bias_add: bool = False,
    layer_idx: int,
) -> nn.Module:
    """A layer with parallel="col", dense where `config` is None; widths are of all processes
    together. With `skip_bias_add` it returns (product, bias) and not the sum."""
    options = {"parallel": "col", "skip_bias_add": skip_bias_add, "layer_idx": layer_idx}
    if config is None:
        return Linear(in_features, out_features, init_method=drawn_later, **options)
    return structured_linear(config, in_features, out_features, **options)


def row_linear(
    config: LinearConfig | None,
    in_features: int,
    out_features: int,
    *,
    dropout: float,
    fused: bool,
    layer_idx: int,
) -> nn.Module:
    """A layer with parallel="row", as `column_linear`; `fused`: one operator adds bias and
    drops."""
    options = {"parallel": "row", "skip_bias_add": True, "layer_idx": layer_idx}
    if config is None:
        layer = RowLinear(in_features, out_features, init_method=drawn_later, **options)
    else:
        layer = structured_linear(config, in_features, out_features, **options)
    layer.dropout, layer.fused = nn.Dropout(dropout), fused
    return layer


def structured_linear(config: LinearConfig, *sizes: int, **options: Any) -> Projection:
    """A `Projection` of the kind that a config names, with its other arguments."""
    return _PROJECTIONS[config.target](config, *sizes, **options)


class RowLinear(Linear):
    """LiBai's Linear with parallel="row" at the end of a branch; see `row_linear`."""

    def forward(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        """(batch, time, in_features) and (batch, time, out_features) to the latter."""
        # super() would fail here: in a graph `self` is a stand-in of the module.
        return residual + bias_dropout(*Linear.forward(self, x), self.dropout, self.fused)


class Projection(StructuredLinear):
    """A structured layer in the place of LiBai's Linear, with its arguments; with parallel="row" it
    ends a branch, see `row_linear`, or its output goes where `sbp` says."""

    def __init__(
        self,
        config: LinearConfig,
        in_features: int,
        out_features: int,
        *,
        parallel: str,
        layer_idx: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        sbp: Any = None,
    ) -> None:
        layout = dist.get_dist_util()
        # The axis of tensor parallelism is the last one of a placement, where there is one.
        axis = None
        if layout.is_tensor_model_parallel():
            axis = 1 if layout.is_data_parallel() else 0
        super().__init__(
            config.build(in_features, out_features, bias),
            dist.get_layer_placement(layer_idx),
            axis,
            SPLIT if parallel == "col" else WHOLE,
        )
        self.skip_bias_add, self.sbp = skip_bias_add, sbp

    def forward(
        self, x: flow.Tensor, residual: flow.Tensor | None = None
    ) -> flow.Tensor | tuple[flow.Tensor, flow.Tensor]:
        """(batch, time, in_features) to (batch, time, out_features), and the bias if skipped; with
        the `residual` of that shape, the end of a branch."""
        if residual is not None:
            bias = self.read_bias()
            return residual + bias_dropout(self.matmul(x), bias, self.dropout, self.fused)
        if self.skip_bias_add:
            return self.matmul(x), self.read_bias()
        y = self.with_bias(x)
        return y if self.sbp is None else y.to_global(sbp=self.sbp, grad_sbp=y.sbp)


class MonarchProjection(Projection, ParallelMonarchLinear):
    pass


class BlockdiagProjection(Projection, ParallelBlockdiagLinear):
    pass


# By the class that a config names.
_PROJECTIONS = {
    MonarchLinear.__name__: MonarchProjection,
    BlockdiagLinear.__name__: BlockdiagProjection,
}


class QueryKeyValue(nn.Module):
    """Queries, keys and values by three structured layers, interleaved by head as a dense one's."""

    def __init__(
        self, config: LinearConfig, in_features: int, head_size: int, *, layer_idx: int
    ) -> None:
        super().__init__()
        self.head_size = head_size
        for name in QKV_PARTS:
            layer = column_linear(config, in_features, in_features, layer_idx=layer_idx)
            setattr(self, name, layer)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to (batch, time, 3 hidden), in (heads, 3, head size), heads
        split."""
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        batch, time, width = parts[0].shape
        heads = [
            part.reshape(batch, time, width // self.head_size, self.head_size) for part in parts
        ]
        return flow.cat(heads, dim=3).reshape(batch, time, 3 * width)
