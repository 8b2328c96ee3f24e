"""A MonarchLinear on global tensors, its blocks split over tensor-parallel ranks."""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.monarch import monarch_multiply

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import MonarchLinear
from monarch_flow.parallel.multiply import check_blocks, features, rank_count, split_multiply
from monarch_flow.parallel.relayout import read, relayout

WHOLE, SPLIT = "whole", "split"

_ATTRIBUTES = (
    "in_features",
    "out_features",
    "in_features_extended",
    "out_features_extended",
    "nblocks",
)


class ParallelMonarchLinear(MonarchLinear):
    """The function of the layer it is made of, with the blocks split over ranks.

    Names and logical shapes of its parameters are those of MonarchLinear, so that state dicts fit
    both. Its input may be whole on the tensor-parallel ranks or split over its features. Its output
    is whole, or split over its features as another ParallelMonarchLinear takes them; GELU between
    the two needs no exchange. `traffic.py` counts what is exchanged.

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
        layer: MonarchLinear,
        placement: flow.placement,
        axis: int | None = 0,
        output: str = WHOLE,
    ) -> None:
        nn.Module.__init__(self)
        if output not in (WHOLE, SPLIT):
            raise UserError(f"output is {output!r}; it is '{WHOLE}' or '{SPLIT}'")
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(layer, name))
        self.axis, self.output = axis, output
        if axis is not None:
            check_blocks(self.nblocks, rank_count(placement, axis))
        self._layouts: dict[str, list[flow.sbp.sbp]] = {}
        everywhere = [flow.sbp.broadcast] * len(placement.ranks.shape)
        for name in ("bias", "blkdiag1", "blkdiag2"):
            parameter = getattr(layer, name)
            if parameter is None:
                self.register_parameter(name, None)
                continue
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
        if self.axis is None:
            return self._repeated(x, self.read_bias())
        if x.ndim == 1:
            return self.add_bias(self.matmul(x.unsqueeze(0))).squeeze(0)
        return self.add_bias(self.matmul(x))

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T without the bias, for a global x (..., in_features) of 2 or more axes. The result
        (..., out_features) is on `axis` whole or split over its last axis, as `output` says."""
        if self.axis is None:
            return self._repeated(x, None)
        if self.in_features_extended != self.in_features:
            x = self.pad(relayout(x, self.axis, flow.sbp.broadcast))
        grid = split_multiply(x, *self._read_factors(), self.axis)
        split = self.output == SPLIT
        cropped = self.out_features_extended != self.out_features
        y = self.crop(features(grid, self.axis, split=split and not cropped))
        return relayout(y, self.axis, flow.sbp.split(y.ndim - 1)) if split else y

    def add_bias(self, y: flow.Tensor) -> flow.Tensor:
        bias = self.read_bias()
        if bias is None:
            return y
        return y + (bias if bias.dtype == y.dtype else bias.to(y.dtype))

    def read_bias(self) -> flow.Tensor | None:
        """The bias for one forward pass, split as the output is."""
        return None if self.bias is None else read(self.bias, self._layouts["bias"])

    def _repeated(self, x: flow.Tensor, bias: flow.Tensor | None) -> flow.Tensor:
        return monarch_multiply(x, *self._read_factors(), bias, out_features=self.out_features)

    def _read_factors(self) -> tuple[flow.Tensor, flow.Tensor]:
        first = read(self.blkdiag1, self._layouts["blkdiag1"])
        return first, read(self.blkdiag2, self._layouts["blkdiag2"])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axis={self.axis}, output={self.output}"
