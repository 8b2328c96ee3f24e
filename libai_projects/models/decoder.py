"""A decoder on this process's part of the weights, for generation: rows (tokens, width) of local
tensors in, the same out. Only sums over tensor parallelism leave the process.

Dense layers become packed ones, rounded to the dtype that was asked for. A Monarch or
block-diagonal layer is whole on each process, with its factors rounded: for the few tokens of a
step that costs less than an exchange in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel.kernels.generation import (
    Norm,
    PackedLinear,
    PagedAttention,
    activate,
    rounded,
)
from oneflow_accel.kernels.monarch import monarch_multiply
from oneflow_accel.kernels.transformer import swiglu

import numpy as np
import oneflow as flow
from oneflow import nn

from libai_projects.models.layers import Projection
from libai_projects.models.processes import COLUMNS, ROWS, Place, local
from monarch_flow.layers import MonarchLinear
from monarch_flow.parallel import SPLIT

# (rows, residual, norm) to rows.
LinearLayer = Callable[..., flow.Tensor]


def embedded(weight: flow.Tensor, ids: np.ndarray) -> flow.Tensor:
    """Rows of a local (rows, width), of (tokens,) whole numbers: (tokens, width)."""
    return flow._C.gather(weight, flow.tensor(ids.astype(np.int64), device=weight.device), axis=0)


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), then x + outer(act(inner(norm(x)))).

    `query_key_value` gives all heads of queries, then of keys, then of values; `inner` has the
    activation; `dense` and `outer` add the residual.
    """

    attention: PagedAttention
    input_norm: Norm
    post_norm: Norm
    query_key_value: LinearLayer
    dense: LinearLayer
    inner: LinearLayer
    outer: LinearLayer

    def __call__(
        self,
        x: flow.Tensor,
        keys: flow.Tensor,
        values: flow.Tensor,
        places: Sequence[flow.Tensor | None],
    ) -> flow.Tensor:
        """(tokens, width) to the same; the tokens' keys and values are written to the pages, of
        which `places` are what else `paged_attention` takes."""
        qkv = self.query_key_value(x, norm=self.input_norm)
        context = self.attention(qkv, keys, values, *places)
        x = self.dense(context, x)
        return self.outer(self.inner(x, norm=self.post_norm), x)


@dataclass(frozen=True)
class LocalLayers:
    """Makes the parts of a `DecoderLayer` of modules on global tensors; collective."""

    place: Place
    device: flow.device
    dtype: str

    def norm(self, module: nn.Module) -> Norm:
        """Of LiBai's LayerNorm or, without a bias, an RMSNorm."""
        if getattr(module, "bias", None) is None:
            return Norm("rms", local(module.weight), None, module.eps)
        return Norm("layer", local(module.weight), local(module.bias), module.eps)

    def column(
        self,
        *modules: nn.Module,
        order: Callable[[np.ndarray], np.ndarray] = np.asarray,
        activation: str = "",
        gate: bool = False,
    ) -> LinearLayer:
        """Layers with parallel="col" side by side; `order` puts the outputs of dense ones, on the
        first axis, into another order. The last two are `PackedLinear`'s."""
        if isinstance(modules[0], Projection):
            parts = [self._structured(each, activation) for each in modules]
            return parts[0] if len(parts) == 1 else SideBySide(parts, gate)
        weights = [local(each.weight, COLUMNS).numpy().T for each in modules]
        biases = [local(each.bias, ROWS).numpy() for each in modules if each.bias is not None]
        weight, bias = np.concatenate(weights), np.concatenate(biases) if biases else None
        return self.packed(weight, bias, order, activation=activation, gate=gate)

    def row(self, module: nn.Module) -> LinearLayer:
        """A layer with parallel="row", which adds the residual."""
        if isinstance(module, Projection):
            return self._structured(module)
        weight = local(module.weight, ROWS).numpy().T
        bias = None if module.bias is None else local(module.bias)
        if len(self.place.group) > 1:
            return PartialLinear(self.packed(weight), bias, self.place)
        return self.packed(weight, None if bias is None else bias.numpy())

    def packed(
        self,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        order: Callable[[np.ndarray], np.ndarray] = np.asarray,
        **settings: Any,
    ) -> LinearLayer:
        """A dense layer of (outputs, inputs) float32 weights."""
        if weight.size == 0:
            return elsewhere
        bias = None if bias is None else order(bias)
        return PackedLinear(order(weight), bias, self.dtype, self.device, **settings)

    def _structured(self, module: Projection, activation: str = "") -> LinearLayer:
        names = ("blkdiag1", "blkdiag2") if isinstance(module, MonarchLinear) else ("weight",)
        factors = [local(getattr(module, name)).numpy() for name in names]
        bias = None if module.bias is None else local(module.bias)
        if factors[0].size == 0:
            return elsewhere
        arrays = tuple(flow.tensor(rounded(x, self.dtype), device=self.device) for x in factors)
        split = module.output == SPLIT
        return StructuredLinear(arrays, bias, module.out_features, self.place, split, activation)


def elsewhere(*_: object, **__: object) -> flow.Tensor:
    """In the place of a layer of another stage, of which this process has no weights."""
    raise RuntimeError("this layer is on another stage of the pipeline")


@dataclass(frozen=True)
class SideBySide:
    """The outputs of several layers of the same rows, one layer's after the other's; with `gate`
    silu of the first's times the second's."""

    parts: Sequence[LinearLayer]
    gate: bool

    def __call__(self, x: flow.Tensor, norm: Norm | None = None) -> flow.Tensor:
        x = x if norm is None else norm(x)
        found = [part(x) for part in self.parts]
        return swiglu(*found) if self.gate else flow.cat(found, dim=-1)


@dataclass(frozen=True)
class PartialLinear:
    """A layer of which each process of the group has some of the inputs."""

    product: LinearLayer
    bias: flow.Tensor | None
    place: Place

    def __call__(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        y = self.place.sum(self.product(x))
        return residual + (y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class StructuredLinear:
    """A whole Monarch layer, of two factors, or block-diagonal one, of its blocks; its outputs are
    split over processes or, not `split`, its inputs."""

    arrays: tuple[flow.Tensor, ...]
    bias: flow.Tensor | None
    outputs: int
    place: Place
    split: bool
    activation: str

    def __call__(
        self, x: flow.Tensor, residual: flow.Tensor | None = None, norm: Norm | None = None
    ) -> flow.Tensor:
        group = self.place.group
        x = x if norm is None else norm(x)
        if not self.split:
            x = self.place.join(x.contiguous(), (x.shape[-1],) * len(group))
        y = activate(self._product(x), self.activation)
        if self.split and len(group) > 1:
            width = y.shape[-1] // len(group)
            y = flow._C.narrow(y, 1, width * group.index(self.place.rank), width)
        return y if residual is None else residual + y

    def _product(self, x: flow.Tensor) -> flow.Tensor:
        if len(self.arrays) == 2:
            return monarch_multiply(x, *self.arrays, self.bias, out_features=self.outputs)
        (weight,) = self.arrays
        blocks, block_out, block_in = weight.shape
        x = flow._C.pad(x, [0, blocks * block_in - x.shape[-1]])
        rows = x.reshape(-1, blocks, block_in).permute(1, 0, 2)
        y = flow._C.matmul(rows, weight, transpose_b=True).permute(1, 0, 2)
        y = y.reshape(-1, blocks * block_out)
        y = flow._C.narrow(y, 1, 0, self.outputs)
        return y if self.bias is None else y + self.bias
