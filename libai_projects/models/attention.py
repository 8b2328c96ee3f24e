"""Causal attention: on global tensors with dropout for training, and after the cached keys and
values of earlier tokens for generation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oneflow_accel.kernels.attention import HIDDEN, causal_softmax, scaled_dot_product_attention

import numpy as np
import oneflow as flow
from libai.layers import Dropout
from libai.utils import distributed as dist

from libai_projects.models.dropout import fused_causal_softmax_dropout, is_active

Pair = tuple[flow.Tensor, flow.Tensor]


def split_heads(x: flow.Tensor, size: int) -> flow.Tensor:
    """(batch, time, heads x size) to (batch, heads, time, size)."""
    batch, time, width = x.shape
    # With one token the order of the numbers stays the same, so a reshape is enough.
    if time == 1:
        return x.reshape(batch, width // size, 1, size)
    return x.reshape(batch, time, width // size, size).permute(0, 2, 1, 3)


def merge_heads(x: flow.Tensor) -> flow.Tensor:
    """(batch, heads, time, size) to (batch, time, heads x size)."""
    batch, heads, time, size = x.shape
    return (x if time == 1 else x.permute(0, 2, 1, 3)).reshape(batch, time, heads * size)


def causal_attention(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    dropout: Dropout,
    *,
    fused: bool,
    layer_scale: int = 1,
) -> flow.Tensor:
    """dropout(softmax(q k^T / sqrt(head size))) v, operator by operator (Vaswani et al. 2017).

    Tensors are (batch, heads, time, head size), global. With `fused` one operator scales, masks,
    normalizes and drops. The scores are divided by `layer_scale` inside the product and multiplied
    after it: the same function, for the range of half precision.
    """
    scale = float(layer_scale)
    factor = 1.0 / (math.sqrt(query.shape[-1]) * scale)
    scores = flow.matmul(query, key, transpose_b=True, alpha=factor)
    if not fused:
        weights = dropout(causal_softmax(scores, scale))
    elif is_active(dropout):
        weights = fused_causal_softmax_dropout(scores, scale, dropout)
    else:
        seen = _causal_mask(scores)
        weights = flow._C.fused_scale_mask_softmax(scores, seen, fill_value=HIDDEN, scale=scale)
    return flow.matmul(weights, value)


def _causal_mask(scores: flow.Tensor) -> flow.Tensor:
    """True where a row sees a column, (1, 1, rows, columns); made in the forward, as a graph must
    not capture a free tensor."""
    rows, columns = scores.shape[-2:]
    sbp = dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    place = {"dtype": flow.int32, "placement": scores.placement, "sbp": sbp}
    row = flow.arange(rows, **place).reshape(1, 1, rows, 1) + (columns - rows)
    return flow.arange(columns, **place).reshape(1, 1, 1, columns) <= row


class Hidden:
    """Which tokens the last `queries` positions see beyond the causal rule: `mask` (batch, length)
    bool is False for padding. With `fused` softmax takes truth values, else a sum."""

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


@dataclass
class Past:
    """What layer `layer` sees in a step of generation; `pairs` are local keys and values.

    These grow by concatenation: a buffer of the full length would have to be made contiguous for
    the attention operator at every step, which copies as much.
    """

    pairs: list[Pair | None]
    layer: int
    hidden: Hidden | None

    @property
    def held(self) -> Pair | None:
        return self.pairs[self.layer]

    def keep(self, key: flow.Tensor, value: flow.Tensor) -> None:
        self.pairs[self.layer] = (key, value)

    def attend(self, query: flow.Tensor, key: flow.Tensor, value: flow.Tensor) -> flow.Tensor:
        """Append keys and values and attend to all of them; (batch, heads, new, head size)."""
        held = self.held
        if held is not None:
            key, value = flow._C.concat([held[0], key], 2), flow._C.concat([held[1], value], 2)
        self.keep(key, value)
        scale = 1.0 / math.sqrt(query.shape[-1])
        if self.hidden is None:
            causal = query.shape[2] > 1
            return scaled_dot_product_attention(query, key, value, causal=causal, scale=scale)
        scores = flow._C.matmul(query, key, transpose_b=True)
        return flow._C.matmul(self.hidden.softmax(scores, scale), value)
