"""Attention of one head that leaves keys out or approximates them, with the weights of one that
does not."""

from __future__ import annotations

import math
from contextlib import nullcontext

from oneflow_accel.backends import delegate_of
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.operators import numbers, widened

import oneflow as flow
from oneflow import nn

from monarch_flow.models.attention import orthogonal_rows

# Products of fewer queries are slow.
_LEAST_BLOCK = 16


class LocalAttention(nn.Module):
    """softmax(scale q k^T) v, qkv (N, tokens, 3 dim) to (N, tokens, dim), without the products of
    all tokens with all:

    - `local_context` alone: query i sees keys i - local_context // 2 to i + (local_context + 1) //
      2 - 1;
    - `nb_features` alone: all keys by so many positive random features (Choromanski et al. 2021);
    - both: the window exactly, the others by features (Chen et al. 2021, "Scatterbrain").

    The buffer `feature_map.projection_matrix` (rows, dim), orthogonal rows as long as Gaussian
    vectors, is drawn once and saved; beside a window a row w gives two features, of w and -w. 16
    bits are computed in float32, under autocast too. Raises UserError where there is nothing to see.
    """

    def __init__(
        self, dim: int, scale: float, local_context: int = 0, nb_features: int = 0
    ) -> None:
        super().__init__()
        self.dim, self.scale, self.context = dim, scale, local_context
        rows = nb_features // 2 if local_context else nb_features
        if min(local_context, rows - bool(nb_features)) < 0 or not (local_context or rows):
            raise UserError(
                f"local_context={local_context}, nb_features={nb_features}: attention takes a "
                "window of keys, random features, or a window and at least 2 features"
            )
        self.features = 2 * rows if local_context else rows
        if rows:
            self.feature_map = nn.Module()
            lengths = flow.randn(rows, dim).norm(dim=1, keepdim=True)
            matrix = flow.tensor(orthogonal_rows(rows, dim)) * lengths
            self.feature_map.register_buffer("projection_matrix", matrix)

    def own_macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulates of the products with a window's keys and values and of their
        features; of features, of what they add up to, and of that with the queries'."""
        macs = min(self.context, shape[1]) * (2 * self.dim + self.features)
        if self.features:
            rows = len(self.feature_map.projection_matrix)
            macs += 2 * rows * self.dim + self.features * (2 * self.dim + 1)
        return shape[0] * shape[1] * macs

    def forward(self, qkv: flow.Tensor) -> flow.Tensor:
        device = delegate_of(qkv.placement.type if qkv.is_global else qkv.device.type)
        is_on = flow.is_autocast_enabled()
        with flow.autocast(device, enabled=False) if is_on else nullcontext():
            parts = (widened(qkv.narrow(2, part * self.dim, self.dim)) for part in range(3))
            query, key, value = parts
            root = math.sqrt(self.scale)
            return self._attention(query * root, key * root, value).to(qkv.dtype)

    def _attention(self, query: flow.Tensor, key: flow.Tensor, value: flow.Tensor) -> flow.Tensor:
        """Of query and key that have the scale."""
        multiply, tokens = flow._C.matmul, query.shape[1]
        if self.features:
            # exp(q k) is near the sum of queries keys, times exp(log_scale).
            queries, query_scale = self._features(query, (-1,))
            keys, key_scale = self._features(key, (1, 2))
            sums = multiply(queries, multiply(keys, value, transpose_a=True))
            total = multiply(queries, keys.sum(dim=1, keepdim=True), transpose_b=True)
            if not self.context:
                return sums / total
        size = max(self.context // 2, _LEAST_BLOCK)
        hidden = self._hidden(query, size)
        spans = _blocks(value, size, 1)
        # exp is 0 of what is hidden.
        scores = multiply(_blocks(query, size), _blocks(key, size, 1), transpose_b=True)
        scores = scores - hidden * 1e24
        if not self.features:
            out = multiply(flow.softmax(scores, dim=-1), spans)
        else:
            inside = multiply(_blocks(queries, size), _blocks(keys, size, 1), transpose_b=True)
            inside = inside * (1 - hidden)
            rest = _blocks(total, size) - inside.sum(dim=-1, keepdim=True)
            # Where a window holds nearly all, rounding may leave less than nothing of the others.
            rest = flow.relu(rest) + 1e-24
            log_scale = _blocks(query_scale + key_scale - math.log(self.features), size)
            most = flow.amax(scores, dim=-1, keepdim=True)
            most = flow.maximum(most, flow.log(rest) + log_scale).detach()
            exact, scale = flow.exp(scores - most), flow.exp(log_scale - most)
            out = multiply(exact - inside * scale, spans) + _blocks(sums, size) * scale
            out = out / (exact.sum(dim=-1, keepdim=True) + rest * scale)
        return out.reshape(out.shape[0], -1, self.dim).narrow(1, 0, tokens)

    def _features(self, x: flow.Tensor, axes: tuple[int, ...]) -> tuple[flow.Tensor, flow.Tensor]:
        """Features of which the greatest along `axes` is 1, (N, tokens, features), and the logarithm
        of what they were divided by."""
        logs = flow._C.matmul(x, self.feature_map.projection_matrix.to(x.dtype), transpose_b=True)
        logs = flow.cat([logs, -logs], dim=-1) if self.context else logs
        logs = logs - (x * x).sum(dim=-1, keepdim=True) / 2
        most = flow.amax(logs.detach(), dim=axes, keepdim=True)
        return flow.exp(logs - most), most

    def _hidden(self, x: flow.Tensor, size: int) -> flow.Tensor:
        """1 for keys outside a query's window, else 0: (blocks, size, 3 size)."""
        tokens = x.shape[1]
        place = numbers(3 * size, x) - size
        distance = place - numbers(size, x).reshape(size, 1)
        key = place + numbers(-(-tokens // size), x).reshape(-1, 1, 1) * size
        near = (distance >= -(self.context // 2)).to(x.dtype)
        near = near * (distance < (self.context + 1) // 2).to(x.dtype)
        return 1 - near * (key >= 0).to(x.dtype) * (key < tokens).to(x.dtype)


def _blocks(x: flow.Tensor, size: int, beside: int = 0) -> flow.Tensor:
    """(N, tokens, n) to (N, blocks, (1 + 2 beside) size, n): each block of tokens between so many
    others; 0 where there is no token."""
    number = -(-x.shape[1] // size)
    x = nn.functional.pad(x, (0, 0, beside * size, (number + beside) * size - x.shape[1]))
    shape = (x.shape[0], number, size, x.shape[2])
    places = range(0, (1 + 2 * beside) * size, size)
    return flow.cat([x.narrow(1, i, number * size).reshape(shape) for i in places], dim=2)
