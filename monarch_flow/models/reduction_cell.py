"""ViTAE's reduction cells (Xu et al. 2021, section 3): maps become smaller, and tokens."""

from __future__ import annotations

from collections.abc import Sequence

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.models.conv_branch import ReductionBranch, reduction_strides
from monarch_flow.models.map_layers import MapConv2d
from monarch_flow.models.maps import Grid, map_to_tokens, maps_to_tokens
from monarch_flow.models.performer import TokenPerformer


@bfloat16_container
class PyramidReduction(nn.Module):
    """Maps (N, H, W, in_chans) to tokens (N, H' W', len(dilations) width).

    A convolution with a bias for each dilation, side by side in the tokens, the first dilation
    first; then an exact GELU. The padding ceil(((kernel - 1) dilation + 1 - stride) / 2) gives all
    of them one size, `stride` times smaller each way.
    """

    def __init__(
        self, in_chans: int, width: int, kernel: int, stride: int, dilations: Sequence[int]
    ) -> None:
        super().__init__()
        self.width = width * len(dilations)
        self.convs = nn.ModuleList(
            [
                nn.Sequential(
                    MapConv2d(
                        in_chans,
                        width,
                        kernel,
                        stride,
                        padding=_padding(kernel, stride, dilation),
                        dilation=dilation,
                    )
                )
                for dilation in dilations
            ]
        )
        # One serves all; published models have one in each Sequential, but it has no parameters.
        self.act = nn.GELU()

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.act(maps_to_tokens([conv(x) for conv in self.convs]))


@bfloat16_container
class EmbeddingCell(nn.Module):
    """A pyramid reduction `PRM` alone: the cell that ViTAE calls "performer_less"."""

    def __init__(
        self, in_chans: int, width: int, kernel: int, stride: int, dilations: Sequence[int]
    ) -> None:
        super().__init__()
        self.PRM = PyramidReduction(in_chans, width, kernel, stride, dilations)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.PRM(x)


@bfloat16_container
class ReductionCell(nn.Module):
    """y = attention(norm1(PRM(x))) + PCM(x), then y + mlp(norm2(y)): maps (N, H, W, in_chans) to
    tokens (N, H' W', out_dim).

    `PRM` is a pyramid reduction, `PCM` the convolutions beside it, `width` channels wide inside. A
    performer, `attn`, is attention and MLP; its dropout of 0.1 is fixed.
    """

    def __init__(
        self,
        in_chans: int,
        width: int,
        out_dim: int,
        kernel: int,
        stride: int,
        dilations: Sequence[int],
    ) -> None:
        super().__init__()
        self.PCM = ReductionBranch(in_chans, width, out_dim, stride)
        self.PRM = PyramidReduction(in_chans, width, kernel, stride, dilations)
        self.attn = TokenPerformer(self.PRM.width, out_dim)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.attn(self.PRM(x), map_to_tokens(self.PCM(x)))


def reduced_grid(grid: Grid, kernel: int, stride: int) -> Grid:
    """The size of the map that a reduction cell makes of one of (rows, columns).

    With an odd kernel and an even stride it does not depend on the dilation. Raises UserError where
    nothing is left, or PCM and PRM give different sizes: with a stride of 4 a side must be a
    multiple of 4 or one less.
    """
    rows, columns = (_reduced_side(side, kernel, stride) for side in grid)
    if min(rows, columns) < 1 or any(
        _branch_side(side, stride) != reduced
        for side, reduced in zip(grid, (rows, columns), strict=True)
    ):
        raise UserError(
            f"images or maps of {grid[0]} x {grid[1]} cannot be reduced {stride} times each way: "
            f"choose a multiple of {stride} for both sides"
        )
    return rows, columns


def _padding(kernel: int, stride: int, dilation: int) -> int:
    return -(-((kernel - 1) * dilation + 1 - stride) // 2)


def _convolved_side(side: int, kernel: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - kernel) // stride + 1


def _reduced_side(side: int, kernel: int, stride: int) -> int:
    return _convolved_side(side, kernel, stride, _padding(kernel, stride, 1))


def _branch_side(side: int, ratio: int) -> int:
    for stride in reduction_strides(ratio):
        side = _convolved_side(side, 3, stride, 1)
    return side
