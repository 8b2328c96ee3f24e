"""Linear layers that keep some square blocks of their matrix: stored as blocks, or masked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from monarch_flow.layers.config import register_linear
from monarch_flow.layers.sparsity import SparsityConfig
from monarch_flow.layers.structured import (
    InitFunction,
    OptionReaders,
    StructuredLinear,
    drawn_dense,
    fill,
    new_parameter,
    uniform,
)

# Names that configs of the papers' own code use. There they are three libraries with three layouts
# of the same weight; here all mean the one way below, which runs on every device.
BACKENDS = ("triton", "huggingface", "dense", None)

_FBBFLY = {
    "_target_": "FlatBlockButterflySparsityConfig",
    "butterfly_size": 16,
    "n_factors": 2,
    "block": 32,
}


@register_linear("fbbfly", sparsity_config=_FBBFLY, backend="dense")
class BlockSparseLinear(StructuredLinear):
    """y = x M^T + bias with M zero outside the blocks that a pattern keeps.

    Widths are padded to multiples of the pattern's block. The weight starts as a dense matrix, each
    row of blocks times sqrt(all blocks / kept blocks of the row), which keeps the output's
    variance; the bias as U(-1/sqrt(n'), 1/sqrt(n')) with the padded input width n'.

    The matrix is put together before the product: this saves parameters, gradients and optimizer
    state, but no time. All `backend`s ("triton", "huggingface", "dense") do the same here.

    Attributes:
        weight: parameter (blocks kept, block, block), in row-major order of the blocks.
        layout: buffer (m' / block, n' / block), int64, 1 where a block is kept; `kept_blocks` is
            the same as a bool array.
        no_weight_decay: names of parameters that training must not decay.

    Raises:
        UserError: the pattern does not fit these widths, or a name is unknown.
    """

    option_readers: ClassVar[OptionReaders] = {"sparsity_config": SparsityConfig.of}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sparsity_config: SparsityConfig | Mapping[str, Any],
        bias: bool = True,
        backend: str | None = "dense",
        weight_decay: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if backend not in BACKENDS:
            raise UserError(f"backend {backend!r} is none of {', '.join(map(str, BACKENDS))}")
        self.sparsity_config = SparsityConfig.of(sparsity_config)
        self.block = side = self.sparsity_config.block
        self.in_features_extended = -(-in_features // side) * side
        self.out_features_extended = -(-out_features // side) * side
        layout = self.sparsity_config.layout(self.out_features_extended, self.in_features_extended)
        # Kept as an array too: it is whole on every rank even when the buffers are global.
        self.kept_blocks = layout
        self.no_weight_decay = () if weight_decay else ("weight",)
        self.weight = new_parameter((int(layout.sum()), side, side), device, dtype)
        self.register_buffer(
            "layout", flow.tensor(layout.astype(np.int64), device=self.weight.device)
        )
        # The place of each block follows from the layout, so no checkpoint needs it.
        places = np.flatnonzero(layout)[:, None]
        self.register_buffer(
            "places", flow.tensor(places, device=self.weight.device), persistent=False
        )
        self.reset_parameters()

    def macs_per_row(self) -> int:
        """Weights of the kept blocks: what a kernel that skips the others would compute."""
        return math.prod(self.weight.shape)

    def bias_fan(self) -> int:
        return self.in_features_extended

    def draw_from(self, init_function: InitFunction) -> None:
        """Draw a matrix (m', n'); scale each row of blocks by sqrt(all blocks / kept blocks)."""
        layout, side = self.kept_blocks, self.block
        dense = drawn_dense(self.out_features_extended, self.in_features_extended, init_function)
        rows, columns = layout.shape
        blocks = dense.reshape(rows, side, columns, side).transpose(0, 2, 1, 3)
        scale = np.sqrt(columns / np.maximum(layout.sum(axis=1), 1))
        fill(self.weight, (blocks * scale[:, None, None, None])[layout])

    def whole_weight(self) -> flow.Tensor:
        """The matrix with its zeros, (m', n')."""
        rows, columns = self.kept_blocks.shape
        side = self.block
        updates = self.weight.reshape(self.weight.shape[0], side * side)
        blocks = flow._C.scatternd(self.places, updates, (rows * columns, side * side))
        whole = blocks.reshape(rows, columns, side, side).permute(0, 2, 1, 3)
        return whole.reshape(rows * side, columns * side)

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        return flow._C.matmul(x, self.whole_weight(), transpose_b=True)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A checkpoint of another pattern must be an error, not other zeros."""
        given = state_dict.get(f"{prefix}layout")
        if given is not None:
            if isinstance(given, flow.Tensor):
                given = (given.to_local() if given.is_global else given).numpy()
            if not np.array_equal(np.asarray(given) != 0, self.kept_blocks):
                error_msgs.append(
                    f"{prefix}layout: the checkpoint keeps other blocks than {self.sparsity_config}"
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparsity_config={self.sparsity_config}"


@register_linear()
class MaskedLinear(StructuredLinear):
    """The function of a BlockSparseLinear with a dense weight (m, n), masked in every forward.

    It is for comparison and saves nothing. The weight starts as U(-b, b) with b = 1 / sqrt(n
    density), the bias with b = 1 / sqrt(n). The buffer `mask` (m, n) has the weight's dtype and is
    in no checkpoint. Raises UserError where the pattern does not fit these widths.
    """

    option_readers: ClassVar[OptionReaders] = {"sparsity_config": SparsityConfig.of}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sparsity_config: SparsityConfig | Mapping[str, Any],
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.sparsity_config = SparsityConfig.of(sparsity_config)
        side = self.sparsity_config.block
        rows, columns = (-(-width // side) * side for width in (out_features, in_features))
        layout = self.sparsity_config.layout(rows, columns)
        mask = layout.repeat(side, axis=0).repeat(side, axis=1)[:out_features, :in_features]
        self.kept = int(mask.sum())
        self.weight = new_parameter((out_features, in_features), device, dtype)
        like = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.register_buffer("mask", flow.tensor(mask.astype(np.float32), **like), persistent=False)
        self.reset_parameters()

    @property
    def saving(self) -> float:
        return self.kept / (self.in_features * self.out_features)

    def macs_per_row(self) -> int:
        return self.kept

    def bias_fan(self) -> int:
        return self.in_features

    def reset_parameters(self) -> None:
        uniform(self.weight, self.in_features * self.saving)
        self.reset_bias()

    def reset_dense_init(
        self, init_function: InitFunction, bias_init_function: InitFunction | None = None
    ) -> None:
        """Does nothing: the papers' models leave this layer as its constructor drew it."""

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        return flow._C.matmul(x, self.weight * self.mask, transpose_b=True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparsity_config={self.sparsity_config}"
