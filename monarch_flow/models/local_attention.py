"""Attention of one head that leaves out keys, or approximates them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

from oneflow_accel.backends import delegate_of
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.operators import numbers, widened

import oneflow as flow
from oneflow import nn

from monarch_flow.models.attention import orthogonal


class LocalAttention(nn.Module):
    """softmax(scale q k^T) v without the products of all tokens with all: qkv (N, tokens, 3 dim) to
    (N, tokens, dim). Of `cfg`, `local_context` c gives query i the keys i - c // 2 to i + (c + 1)
    // 2 - 1, `nb_features` all keys by positive random features (Choromanski et al. 2021); both
    give this window exactly and other keys by features (Chen et al. 2021, "Scatterbrain").

    The buffer `feature_map.projection_matrix` (rows, dim), orthogonal rows as long as Gaussian
    vectors, is drawn once and saved; beside a window, row w gives features of w and of -w. 16 bits
    are computed in float32, under autocast too. Raises UserError for another `cfg`.
    """

    def __init__(self, dim: int, scale: float, cfg: Mapping[str, int]) -> None:
        super().__init__()
        self.dim, self.scale = dim, scale
        names = ("local_context", "nb_features")
        self.context, self.features = (cfg.get(name, 0) for name in names)
        self.each = 2 if self.context else 1
        rows, odd = divmod(self.features, self.each)
        if set(cfg) - set(names) or odd or rows > dim or not self.context + self.features > 0:
            raise UserError(
                f"t2tattn1_cfg, t2tattn2_cfg: {dict(cfg)} is not local_context=N, nb_features=N up "
                f"to {dim}, or both, with even nb_features up to {2 * dim}"
            )
        if rows:
            self.feature_map = nn.Module()
            lengths = flow.randn(rows, dim).norm(dim=1, keepdim=True) / math.sqrt(rows)
            self.feature_map.register_buffer("projection_matrix", orthogonal(rows, dim) * lengths)

    def own_macs(self, shape: tuple[int, ...]) -> int:
        """Multiply-accumulates for a window's keys; to make features, to add them up, to read."""
        window = min(self.context, shape[1]) * (2 * self.dim + self.features)
        features = 2 * self.features // self.each * self.dim + self.features * (2 * self.dim + 1)
        return shape[0] * shape[1] * (window + features)

    def forward(self, qkv: flow.Tensor) -> flow.Tensor:
        device = qkv.placement.type if qkv.is_global else qkv.device.type
        is_on = flow.is_autocast_enabled()
        with flow.autocast(delegate_of(device), enabled=False) if is_on else nullcontext():
            return self._attention(*widened(qkv).chunk(3, dim=2)).to(qkv.dtype)

    def _attention(self, query: flow.Tensor, key: flow.Tensor, value: flow.Tensor) -> flow.Tensor:
        query, key = query * math.sqrt(self.scale), key * math.sqrt(self.scale)
        multiply, tokens = flow._C.matmul, query.shape[1]
        if self.features:
            # queries keys^T exp(log_scale) is near exp(query key^T).
            queries, query_scale = self._features(query, (-1,))
            keys, key_scale = self._features(key, (1, 2))
            sums = multiply(queries, multiply(keys, value, transpose_a=True))
            total = multiply(queries, keys.sum(dim=1, keepdim=True), transpose_b=True)
            if not self.context:
                return sums / total
        size = max(self.context // 2, 32)  # Products of fewer queries are slow.
        seen, values = self._seen(query, size), _blocks(value, size, 1)
        scores = multiply(_blocks(query, size), _blocks(key, size, 1), transpose_b=True)
        # exp is 0 of what is not seen.
        scores = scores + (seen - 1) * 1e24
        if not self.features:
            out = multiply(flow.softmax(scores, dim=-1), values)
        else:
            inside = (
                multiply(_blocks(queries, size), _blocks(keys, size, 1), transpose_b=True) * seen
            )
            # The rest of the keys; not below 0, as rounding may make it.
            rest = flow.relu(_blocks(total, size) - inside.sum(dim=-1, keepdim=True)) + 1e-24
            log_scale = _blocks(query_scale + key_scale - math.log(self.features), size)
            most = flow.amax(scores, dim=-1, keepdim=True)
            most = flow.maximum(most, flow.log(rest) + log_scale).detach()
            exact, scale = flow.exp(scores - most), flow.exp(log_scale - most)
            out = multiply(exact - inside * scale, values) + _blocks(sums, size) * scale
            out = out / (exact.sum(dim=-1, keepdim=True) + rest * scale)
        return out.reshape(out.shape[0], -1, self.dim).narrow(1, 0, tokens)

    def _features(self, x: flow.Tensor, axes: tuple[int, ...]) -> tuple[flow.Tensor, flow.Tensor]:
        """Those (N, tokens, features) of x, the greatest along `axes` 1, and the divisor's log."""
        logs = flow._C.matmul(x, self.feature_map.projection_matrix.to(x.dtype), transpose_b=True)
        logs = flow.cat([logs, -logs][: self.each], dim=-1) - (x * x).sum(dim=-1, keepdim=True) / 2
        most = flow.amax(logs.detach(), dim=axes, keepdim=True)
        return flow.exp(logs - most), most

    def _seen(self, x: flow.Tensor, size: int) -> flow.Tensor:
        """1 where a query of a block sees a key of three, else 0: (blocks, size, 3 size)."""
        place, tokens = numbers(3 * size, x) - size, x.shape[1]
        after = place - numbers(size, x).reshape(size, 1) + self.context // 2
        key = place + size * numbers(-(-tokens // size), x).reshape(-1, 1, 1)
        inside = (after >= 0).to(x.dtype) * (after < self.context).to(x.dtype)
        return inside * (key >= 0).to(x.dtype) * (key < tokens).to(x.dtype)


def _blocks(x: flow.Tensor, size: int, beside: int = 0) -> flow.Tensor:
    """(N, tokens, n) to (N, blocks, (1 + 2 beside) size, n): each between its neighbours, or 0."""
    count = -(-x.shape[1] // size)
    x = nn.functional.pad(x, (0, 0, beside * size, (count + beside) * size - x.shape[1]))
    parts = (x.narrow(1, i * size, count * size) for i in range(1 + 2 * beside))
    return flow.cat([part.reshape(len(x), count, size, -1) for part in parts], dim=2)
