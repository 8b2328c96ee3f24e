"""The convolutions beside attention in ViTAE (Xu et al. 2021, section 3: parallel convolution
module). All are 3 x 3 with a bias."""

from __future__ import annotations

from oneflow_accel.errors import UserError

from oneflow import nn

from monarch_flow.models.map_layers import MapBatchNorm2d, MapConv2d


def reduction_strides(ratio: int) -> tuple[int, int, int]:
    """Strides of three convolutions that together make a map `ratio` times smaller each way."""
    left = ratio // 2
    strides = []
    for _ in range(3):
        strides.append(2 if left else 1)
        left //= 2
    return strides[0], strides[1], strides[2]


class ReductionBranch(nn.Sequential):
    """Maps (N, H, W, in_chans) to (N, H / ratio, W / ratio, out_chans), rounded up.

    Three convolutions, each with a SiLU after it; batch norm only after the second. `ratio` is a
    power of 2 up to 8.
    """

    def __init__(self, in_chans: int, width: int, out_chans: int, ratio: int) -> None:
        first, second, third = reduction_strides(ratio)
        super().__init__(
            MapConv2d(in_chans, width, 3, first, 1),
            nn.SiLU(),
            MapConv2d(width, width, 3, second, 1),
            MapBatchNorm2d(width),
            nn.SiLU(),
            MapConv2d(width, out_chans, 3, third, 1),
            nn.SiLU(),
        )


class CellBranch(nn.Sequential):
    """Maps (N, H, W, dim) to the same; UserError where `groups` does not divide the channels.

    Grouped convolutions to the width `hidden` and back, each with batch norm and SiLU, then one
    more of width `dim`. The shallow kind ends with the second convolution.
    """

    def __init__(self, dim: int, hidden: int, groups: int, *, shallow: bool = False) -> None:
        if groups < 1 or dim % groups or hidden % groups:
            raise UserError(
                f"conv_groups={groups} does not divide the {dim} channels of a cell and the "
                f"{hidden} inside it"
            )
        layers = [
            MapConv2d(dim, hidden, 3, padding=1, groups=groups),
            MapBatchNorm2d(hidden),
            nn.SiLU(),
            MapConv2d(hidden, dim, 3, padding=1, groups=groups),
        ]
        if not shallow:
            layers += [
                MapBatchNorm2d(dim),
                nn.SiLU(),
                MapConv2d(dim, dim, 3, padding=1, groups=groups),
                nn.SiLU(),
            ]
        super().__init__(*layers)
