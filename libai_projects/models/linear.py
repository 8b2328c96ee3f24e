"""The linear layers of a block, LiBai's dense ones, Monarch or block-diagonal ones: on global
tensors for training, and this process's part of them for generation.

A layer made with parallel="col" takes whole inputs and gives outputs split over tensor parallelism.
One made with parallel="row" takes split inputs and ends a branch of the block: it gets the residual
too, and gives residual + dropout(product + bias), whole.

Each process that generates keeps a Monarch or block-diagonal layer whole: for the few tokens of a
step that costs less than an exchange in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oneflow_accel.inference.huge_pages import use_huge_pages
from oneflow_accel.kernels.linear import linear
from oneflow_accel.kernels.monarch import monarch_multiply

import oneflow as flow
from libai.layers import Dropout, Linear
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.models.dropout import bias_dropout
from libai_projects.models.processes import COLUMNS, ROWS, Position, local
from libai_projects.weights.monarch import QKV_PARTS
from monarch_flow.layers import BlockdiagLinear, LinearConfig, MonarchLinear, StructuredLinear
from monarch_flow.parallel import (
    SPLIT,
    WHOLE,
    ParallelBlockdiagLinear,
    ParallelMonarchLinear,
)

# The type of an implementation of the operation "linear".
Product = Callable[..., flow.Tensor]


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
    return _PROJECTIONS[config.target](config, in_features, out_features, **options)


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
    end = {"dropout": dropout, "fused": fused, "layer_idx": layer_idx}
    if config is None:
        return RowLinear(in_features, out_features, **end)
    return _PROJECTIONS[config.target](config, in_features, out_features, parallel="row", **end)


class RowLinear(Linear):
    """LiBai's Linear with parallel="row" at the end of a branch; see `row_linear`."""

    def __init__(
        self, in_features: int, out_features: int, *, dropout: float, fused: bool, layer_idx: int
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            parallel="row",
            init_method=drawn_later,
            skip_bias_add=True,
            layer_idx=layer_idx,
        )
        self.dropout, self.fused = Dropout(dropout), fused

    def forward(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        """(batch, time, in_features) and (batch, time, out_features) to the latter."""
        # super() would fail here: in a graph `self` is a stand-in of the module.
        return residual + bias_dropout(*Linear.forward(self, x), self.dropout, self.fused)


class Projection(StructuredLinear):
    """A structured layer in the place of LiBai's Linear, with its arguments; with parallel="row" it
    ends a branch, see `row_linear`."""

    def __init__(
        self,
        config: LinearConfig,
        in_features: int,
        out_features: int,
        *,
        parallel: str,
        skip_bias_add: bool = False,
        dropout: float = 0.0,
        fused: bool = False,
        layer_idx: int,
    ) -> None:
        layout = dist.get_dist_util()
        # The axis of tensor parallelism is the last one of a placement, where there is one.
        axis = None
        if layout.is_tensor_model_parallel():
            axis = 1 if layout.is_data_parallel() else 0
        super().__init__(
            config.build(in_features, out_features),
            dist.get_layer_placement(layer_idx),
            axis,
            SPLIT if parallel == "col" else WHOLE,
        )
        self.skip_bias_add, self.fused = skip_bias_add, fused
        self.dropout = Dropout(dropout)

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
        return self.with_bias(x)


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


def local_linear(module: nn.Module, place: Position) -> LocalLinear | LocalStructured:
    """This process's part of one of the layers above, as a function of local tensors."""
    if isinstance(module, Projection):
        names = ("blkdiag1", "blkdiag2") if isinstance(module, MonarchLinear) else ("weight",)
        arrays = tuple(local(getattr(module, name)) for name in names)
        return LocalStructured(arrays, local(module.bias), place, module.output == SPLIT)
    split = module.parallel == "col"
    # The operator that adds the bias and the residual to the product takes the weight (out, in).
    weight = local(module.weight, COLUMNS if split else ROWS).transpose(0, 1).contiguous()
    use_huge_pages(weight)
    bias = local(module.bias, ROWS) if split else local(module.bias)
    sample = flow.empty(1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return LocalLinear(weight, bias, place, split, linear.choose(sample, weight, bias))


@dataclass(frozen=True)
class LocalLinear:
    """x weight^T + bias, of some rows of the weight (out, in) or, not `split`, of some columns."""

    weight: flow.Tensor
    bias: flow.Tensor
    place: Position
    split: bool
    product: Product

    def __call__(self, x: flow.Tensor, residual: flow.Tensor | None = None) -> flow.Tensor:
        if self.split:
            return self.product(x, self.weight, self.bias)
        if len(self.place.group) == 1:
            return self.product(x, self.weight, self.bias, residual)
        part = flow._C.matmul(x, self.weight, transpose_b=True)
        return residual + (self.place.sum(part) + self.bias)


@dataclass(frozen=True)
class LocalStructured:
    """A whole Monarch layer, of two factors, or block-diagonal one, of its blocks; its outputs are
    split over processes or, not `split`, its inputs."""

    arrays: tuple[flow.Tensor, ...]
    bias: flow.Tensor
    place: Position
    split: bool

    def __call__(self, x: flow.Tensor, residual: flow.Tensor | None = None) -> flow.Tensor:
        group = self.place.group
        if not self.split and len(group) > 1:
            x = self.place.join(x.contiguous(), (x.shape[-1],) * len(group))
        y = self._product(x)
        if not self.split:
            return residual + y
        width = y.shape[-1] // len(group)
        if len(group) == 1:
            return y
        return flow._C.narrow(y, y.ndim - 1, width * group.index(self.place.rank), width)

    def _product(self, x: flow.Tensor) -> flow.Tensor:
        outputs = self.bias.shape[0]
        if len(self.arrays) == 2:
            return monarch_multiply(x, *self.arrays, self.bias, out_features=outputs)
        (weight,) = self.arrays
        blocks, block_out, block_in = weight.shape
        x = flow._C.pad(x, [0, blocks * block_in - x.shape[-1]])
        rows = x.reshape(-1, blocks, block_in).permute(1, 0, 2)
        y = flow._C.matmul(rows, weight, transpose_b=True).permute(1, 0, 2)
        y = y.reshape(*x.shape[:-1], blocks * block_out)
        return flow._C.narrow(y, y.ndim - 1, 0, outputs) + self.bias
