"""Monarch and block-diagonal layers on global tensors, their blocks split over tensor-parallel
ranks."""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.monarch import monarch_multiply

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import BlockdiagLinear, MonarchLinear, StructuredLinear
from monarch_flow.parallel.multiply import check_blocks, features, rank_count, split_multiply
from monarch_flow.parallel.relayout import read, relayout

WHOLE, SPLIT = "whole", "split"


class _ParallelLinear(StructuredLinear):
    """The function of the layer it is made of, with the blocks split over ranks.

    Names and logical shapes of its parameters are that layer's, so that state dicts fit both. Its
    input may be whole on the tensor-parallel ranks or split over its features. Its output is whole,
    or split over its features as another such layer takes them; GELU between the two needs no
    exchange.

    Args:
        layer: local, the same on each rank, as one seed makes it; otherwise the first rank's
            counts.
        placement: the ranks. Others make the layer too and hold nothing.
        axis: the placement's axis of tensor-parallel ranks; on the others the layer is repeated
            (data parallelism). None: repeated on all of them.
        output: "whole" or "split".

    Raises:
        UserError: the ranks do not divide the number of blocks.
    """

    def __init__(
        self,
        layer: MonarchLinear | BlockdiagLinear,
        placement: flow.placement,
        axis: int | None = 0,
        output: str = WHOLE,
    ) -> None:
        nn.Module.__init__(self)
        if output not in (WHOLE, SPLIT):
            raise UserError(f"output is {output!r}; it is '{WHOLE}' or '{SPLIT}'")
        for name, value in vars(layer).items():
            # Widths and switches.
            if isinstance(value, int) and name != "training" and not name.startswith("_"):
                setattr(self, name, value)
        self.axis, self.output = axis, output
        if axis is not None:
            check_blocks(self.nblocks, rank_count(placement, axis))
        self._layouts: dict[str, list[flow.sbp.sbp]] = {}
        everywhere = [flow.sbp.broadcast] * len(placement.ranks.shape)
        if layer.bias is None:
            self.register_parameter("bias", None)
        for name, parameter in layer.named_parameters():
            layout = list(everywhere)
            if axis is not None and (name != "bias" or output == SPLIT):
                layout[axis] = flow.sbp.split(0)
            self._layouts[name] = layout
            # Copy, as training must not change the layer it was made of.
            value = parameter.detach().clone().to_global(placement=placement, sbp=everywhere)
            value = value if layout == everywhere else value.to_global(sbp=layout)
            self.register_parameter(name, nn.Parameter(value, parameter.requires_grad))

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T + bias: (..., in_features) to (..., out_features); ValueError for another width."""
        self.check_input(x)
        return self.with_bias(x.unsqueeze(0)).squeeze(0) if x.ndim == 1 else self.with_bias(x)

    def with_bias(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T + bias, for an x of `matmul`."""
        return self.add_bias(self.matmul(x))

    def add_bias(self, y: flow.Tensor) -> flow.Tensor:
        bias = self.read_bias()
        if bias is None:
            return y
        return y + (bias if bias.dtype == y.dtype else bias.to(y.dtype))

    def read_bias(self) -> flow.Tensor | None:
        """The bias for one forward pass, split as the output is."""
        return None if self.bias is None else self.read("bias")

    def read(self, name: str) -> flow.Tensor:
        """A parameter for one forward pass, in the layout that it was made with."""
        return read(getattr(self, name), self._layouts[name])

    def on_ranks(self, x: flow.Tensor) -> flow.Tensor:
        """The input with zeros for the widths that the blocks add, split as the blocks are."""
        if self.in_features_extended != self.in_features:
            x = self.pad(relayout(x, self.axis, flow.sbp.broadcast))
        return relayout(x, self.axis, flow.sbp.split(x.ndim - 1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axis={self.axis}, output={self.output}"


class ParallelMonarchLinear(_ParallelLinear, MonarchLinear):
    """A MonarchLinear with its blocks split over ranks; `traffic.py` counts what is exchanged."""

    def with_bias(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T + bias, for an x of `matmul`."""
        if self.axis is None:
            return self._repeated(x, self.read_bias())
        return self.add_bias(self.matmul(x))

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T without the bias, for a global x (..., in_features) of 2 or more axes. The result
        (..., out_features) is on `axis` whole or split over its last axis, as `output` says."""
        if self.axis is None:
            return self._repeated(x, None)
        factors = self.read("blkdiag1"), self.read("blkdiag2")
        grid = split_multiply(self.on_ranks(x), *factors, self.axis)
        split = self.output == SPLIT
        cropped = self.out_features_extended != self.out_features
        y = self.crop(features(grid, self.axis, split=split and not cropped))
        return relayout(y, self.axis, flow.sbp.split(y.ndim - 1)) if split else y

    def _repeated(self, x: flow.Tensor, bias: flow.Tensor | None) -> flow.Tensor:
        factors = self.read("blkdiag1"), self.read("blkdiag2")
        return monarch_multiply(x, *factors, bias, out_features=self.out_features)


class ParallelBlockdiagLinear(_ParallelLinear, BlockdiagLinear):
    """A BlockdiagLinear with its blocks split over ranks: only padding and a whole output need an
    exchange. The layer must not shuffle."""

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        """As ParallelMonarchLinear's."""
        assert not self.shuffle, "a rank has the inputs of its own blocks only"
        weight = self.read("weight")
        if self.axis is not None:
            x = self.on_ranks(x)
        elif self.in_features_extended != self.in_features:
            x = self.pad(x)
        blocks, block_out, block_in = weight.shape
        rows = x.reshape(-1, blocks, block_in).permute(1, 0, 2)
        out = flow._C.matmul(rows, weight, transpose_b=True).permute(1, 0, 2)
        y = out.reshape(*x.shape[:-1], blocks * block_out)
        if self.axis is None:
            return self.crop(y)
        if self.output == WHOLE or self.out_features_extended != self.out_features:
            y = self.crop(relayout(y, self.axis, flow.sbp.broadcast))
        split = flow.sbp.split(y.ndim - 1)
        return relayout(y, self.axis, split) if self.output == SPLIT else y
