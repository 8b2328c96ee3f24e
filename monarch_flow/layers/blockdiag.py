"""A linear layer with a block-diagonal matrix; unlike Monarch's, its blocks do not mix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oneflow as flow

from monarch_flow.layers.config import register_linear
from monarch_flow.layers.structured import (
    InitFunction,
    StructuredLinear,
    drawn_dense,
    fill,
    new_parameter,
)
from monarch_flow.layers.targets import check_positive


@register_linear("blockdiag")
class BlockdiagLinear(StructuredLinear):
    """y = x M^T + bias with M of nblocks blocks (bo, bi) on its diagonal, bi = ceil(n / nblocks)
    and bo = ceil(m / nblocks).

    The weight (nblocks, bo, bi) starts as the blocks of a dense matrix times sqrt(nblocks), which
    keeps the output's variance; the bias as U(-1/sqrt(m), 1/sqrt(m)). With `shuffle` input g bi + c
    first moves to place c nblocks + g, as ShuffleNet (Zhang et al. 2018) does between grouped
    convolutions, so that stacked layers mix all channels. Raises UserError where a width or nblocks
    is not a positive whole number.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        nblocks: int = 4,
        shuffle: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.nblocks = check_positive("nblocks", nblocks)
        self.shuffle = shuffle
        block_in, block_out = -(-in_features // nblocks), -(-out_features // nblocks)
        self.in_features_extended = nblocks * block_in
        self.out_features_extended = nblocks * block_out
        self.weight = new_parameter((nblocks, block_out, block_in), device, dtype)
        self.reset_parameters()

    def macs_per_row(self) -> int:
        return math.prod(self.weight.shape)

    def draw_from(self, init_function: InitFunction) -> None:
        """Draw the blocks of a matrix (m', n'), times sqrt(nblocks)."""
        blocks, block_out, block_in = self.weight.shape
        dense = drawn_dense(blocks * block_out, blocks * block_in, init_function)
        diagonal = np.arange(blocks)
        kept = dense.reshape(blocks, block_out, blocks, block_in)[diagonal, :, diagonal]
        fill(self.weight, kept * math.sqrt(blocks))

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        blocks, block_out, block_in = self.weight.shape
        lead = tuple(x.shape[:-1])
        count = math.prod(lead)
        if self.shuffle:
            x = x.reshape(count, blocks, block_in).transpose(1, 2)
        rows = x.reshape(count, blocks, block_in).permute(1, 0, 2)
        out = flow.bmm(rows, self.weight.permute(0, 2, 1)).permute(1, 0, 2)
        return out.reshape(*lead, blocks * block_out)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nblocks={self.nblocks}, shuffle={self.shuffle}"
