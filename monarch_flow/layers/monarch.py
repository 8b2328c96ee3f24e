"""Linear layers of block-diagonal matrices: MonarchLinear, the product of two whose blocks mix, and
BlockdiagLinear, one alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.monarch import monarch_multiply

import numpy as np
import oneflow as flow

from monarch_flow.layers.config import LinearConfig, check_positive, register_linear
from monarch_flow.layers.structured import (
    InitFunction,
    StructuredLinear,
    drawn_dense,
    fill,
    new_parameter,
    uniform,
)

Shape = tuple[int, int, int]


def monarch_shapes(in_features: int, out_features: int, nblocks: int) -> tuple[Shape, Shape]:
    """Shapes blkdiag1 (nblocks, inner, bi) and blkdiag2 (nblocks, bo, inner) of a MonarchLinear.
    With bi = ceil(in / nblocks) and bo = ceil(out / nblocks), inner is min(bi, bo)."""
    block_in, block_out = -(-in_features // nblocks), -(-out_features // nblocks)
    inner = min(block_in, block_out)
    return (nblocks, inner, block_in), (nblocks, block_out, inner)


def parameter_shapes(
    config: LinearConfig, in_features: int, out_features: int, *, bias: bool = True
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a dense, Monarch or block-diagonal layer, in the order
    of its state dict, without making it. Raises UserError for another layer or number of blocks."""
    bias = dict(config.options).get("bias", bias)
    biases: dict[str, tuple[int, ...]] = {"bias": (out_features,)} if bias else {}
    if config.is_dense:
        return {"weight": (out_features, in_features), **biases}
    if config.target not in (MonarchLinear.__name__, BlockdiagLinear.__name__):
        raise UserError(
            "there are dense, Monarch and block-diagonal layers here, not "
            f"{config.target}; the others are for the vision models of monarch_flow. Give null, "
            "'monarch' or 'blockdiag'"
        )
    nblocks = check_positive("nblocks", dict(config.options)["nblocks"])
    if config.target == MonarchLinear.__name__:
        first, second = monarch_shapes(in_features, out_features, nblocks)
        return {**biases, "blkdiag1": first, "blkdiag2": second}
    return {**biases, "weight": (nblocks, -(-out_features // nblocks), -(-in_features // nblocks))}


def numbers_inside(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers that the Monarch and block-diagonal layers of these parameters keep of a row beside
    their inputs: what is between two factors, or the copy that a product with blocks takes."""
    found = 0
    for name, shape in shapes.items():
        if len(shape) == 3 and not name.endswith("blkdiag2"):
            blocks, outputs, inputs = shape
            found += blocks * (outputs if name.endswith("blkdiag1") else inputs)
    return found


@register_linear("monarch")
class MonarchLinear(StructuredLinear):
    """y = x M^T + bias with the Monarch matrix M of two factors (Dao et al. 2022, section 3.1).

    It has about (1 + min(n, m) / max(n, m)) / nblocks of a dense layer's weights, so with n = m at
    most 2 blocks save nothing. Widths that nblocks does not divide are padded with zeros at the end
    of the input and cropped at the end of the output, whose fastest axis is the block.
    `monarch_shapes` gives the shapes of the parameters `blkdiag1` and `blkdiag2`.

    Both factors start as U(-1/sqrt(d), 1/sqrt(d)) with d their last dimension, the bias as
    U(-1/sqrt(m), 1/sqrt(m)): m and not n, unlike nn.Linear. For an input of variance 1 the output
    then has variance 1/9. A model's own rule for dense layers does not apply to it. Raises
    UserError where a width or nblocks is not a positive whole number.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        nblocks: int = 4,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.nblocks = check_positive("nblocks", nblocks)
        shape1, shape2 = monarch_shapes(in_features, out_features, nblocks)
        self.in_features_extended = shape1[0] * shape1[2]
        self.out_features_extended = shape2[0] * shape2[1]
        self.blkdiag1 = new_parameter(shape1, device, dtype)
        self.blkdiag2 = new_parameter(shape2, device, dtype)
        self.reset_parameters()

    def macs_per_row(self) -> int:
        """Weights of both factors, including those that meet padding."""
        return math.prod(self.blkdiag1.shape) + math.prod(self.blkdiag2.shape)

    def reset_parameters(self) -> None:
        uniform(self.blkdiag1, self.blkdiag1.shape[-1])
        uniform(self.blkdiag2, self.blkdiag2.shape[-1])
        self.reset_bias()

    def reset_dense_init(
        self, init_function: InitFunction, bias_init_function: InitFunction | None = None
    ) -> None:
        """Does nothing: a rule for dense matrices does not fit two factors, and the paper's models
        keep the constructor's start, bias included."""

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        return monarch_multiply(x, self.blkdiag1, self.blkdiag2, out_features=self.out_features)

    def with_bias(self, x: flow.Tensor) -> flow.Tensor:
        return monarch_multiply(
            x, self.blkdiag1, self.blkdiag2, self.bias, out_features=self.out_features
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nblocks={self.nblocks}"


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
