"""Linear layers that keep some square blocks of their matrix, stored as blocks or masked, and the
fixed patterns of these blocks.

Each pattern is first an element mask of the whole matrix, then coarsened: a block is stored if any
of its elements is in the mask. Where the pattern's own tiles are not multiples of the block, more
than its nominal density is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from monarch_flow.layers.config import (
    TARGET,
    check_positive,
    fill_options,
    register_linear,
    split_target,
)
from monarch_flow.layers.structured import (
    InitFunction,
    OptionReaders,
    StructuredLinear,
    drawn_dense,
    fill,
    new_parameter,
    uniform,
)

_INTEGER_RATIO_MARGIN = 0.1


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """A pattern of square blocks of `block` elements a side; equal and hashable by value."""

    block: int = 32

    def __post_init__(self) -> None:
        check_positive(f"block of {type(self).__name__}", self.block)

    @staticmethod
    def of(value: SparsityConfig | Mapping[str, Any]) -> SparsityConfig:
        """Read a mapping {"_target_": CLASS, key: value, ...}; UserError names the nearest."""
        if isinstance(value, SparsityConfig):
            return value
        if not isinstance(value, Mapping):
            raise UserError(f"{value!r} is not a sparsity config: give a mapping with '{TARGET}'")
        cls, options = split_target(value, _PATTERNS, "sparsity config")
        return cls(**fill_options(options, cls, (), cls.__name__))

    def to_dict(self) -> dict[str, Any]:
        return {TARGET: f"monarch_flow.layers.{type(self).__name__}", **asdict(self)}

    def element_mask(self, rows: int, columns: int) -> np.ndarray:
        """The pattern before it is coarsened, (rows, columns), bool."""
        raise NotImplementedError

    def layout(self, rows: int, columns: int) -> np.ndarray:
        """Which blocks of a matrix are stored, (rows / block, columns / block), bool. Rows and
        columns must be multiples of `block`. Raises UserError where the pattern does not fit."""
        side = self.block
        if rows % side or columns % side:
            raise UserError(f"blocks of {side} do not divide a matrix of {rows} x {columns}")
        mask = self.element_mask(rows, columns)
        return mask.reshape(rows // side, side, columns // side, side).any(axis=(1, 3))

    def mask(self, rows: int, columns: int) -> np.ndarray:
        """The stored blocks of a matrix of any size, by element, (rows, columns), bool."""
        side = self.block
        layout = self.layout(*(-(-width // side) * side for width in (rows, columns)))
        return layout.repeat(side, axis=0).repeat(side, axis=1)[:rows, :columns]


@dataclass(frozen=True, kw_only=True)
class FlatBlockButterflySparsityConfig(SparsityConfig):
    """Sum of the first factors of a block butterfly matrix (Chen et al. 2021, "Pixelated
    Butterfly", section 3.2): tile (a, c) of a grid of butterfly_size x butterfly_size is there if a
    = c or a xor c = 2^i for an i < n_factors.

    Attributes:
        butterfly_size: a power of 2, at least 2; must divide the matrix.
        n_factors: 1 to log2(butterfly_size).
        global_size: first rows and columns of the matrix that are there whole.
        shuffle: shuffle the columns of the tile grid as ShuffleNet shuffles channels.
    """

    butterfly_size: int
    n_factors: int
    global_size: int = 0
    shuffle: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size = check_positive("butterfly_size", self.butterfly_size, 2)
        if size & (size - 1):
            raise UserError(f"butterfly_size is {size}; it must be a power of 2")
        most = size.bit_length() - 1
        if check_positive("n_factors", self.n_factors) > most:
            raise UserError(f"n_factors is {self.n_factors}; of {size} tiles there are {most}")
        check_positive("global_size", self.global_size, 0)

    def element_mask(self, rows: int, columns: int) -> np.ndarray:
        size = self.butterfly_size
        if rows % size or columns % size:
            raise UserError(
                f"butterfly_size {size} does not divide a matrix of {rows} x {columns}: choose "
                "widths that it divides, or a smaller butterfly_size"
            )
        index = np.arange(size)
        apart = index[:, None] ^ index[None, :]
        tiles = (apart == 0) | np.isin(apart, 2 ** np.arange(self.n_factors))
        if self.shuffle:
            groups = size >> self.n_factors
            tiles = tiles[:, index.reshape(groups, -1).T.ravel()]
        mask = tiles.repeat(rows // size, axis=0).repeat(columns // size, axis=1)
        return _with_global(mask, self.global_size)


@dataclass(frozen=True, kw_only=True)
class BlockdiagSparsityConfig(SparsityConfig):
    """`nblocks` blocks of ceil(rows / nblocks) x ceil(columns / nblocks) on the diagonal; the first
    `global_size` rows and columns are whole."""

    nblocks: int
    global_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("nblocks", self.nblocks)
        check_positive("global_size", self.global_size, 0)

    def element_mask(self, rows: int, columns: int) -> np.ndarray:
        row_block = np.arange(rows) // -(-rows // self.nblocks)
        column_block = np.arange(columns) // -(-columns // self.nblocks)
        return _with_global(row_block[:, None] == column_block[None, :], self.global_size)


@dataclass(frozen=True, kw_only=True)
class NinjaTurtleSparsityConfig(SparsityConfig):
    """Windows along the diagonal and along stripes beside it, whose distance doubles.

    The matrix's shorter side R is cut into windows of `window_size`; stripe j lies sqrt(R) (2^j -
    1) below and right of the diagonal. `step` is the height of a window, and its width along the
    longer side, in window_size; the first `gtoken` rows and columns are whole.
    """

    window_size: int
    stripes: int
    step: int
    gtoken: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window_size", "stripes", "step"):
            check_positive(name, getattr(self, name))
        check_positive("gtoken", self.gtoken, 0)

    def element_mask(self, rows: int, columns: int) -> np.ndarray:
        """Drawn with the shorter side as rows, then turned."""
        short, long = min(rows, columns), max(rows, columns)
        ratio, height = self._ratio(short, long), self._height()
        stride, width = math.isqrt(short), self.step * ratio * self.window_size
        mask = np.zeros((short, long), dtype=bool)
        for stripe in range(self.stripes):
            offset = self._offset(stride, stripe)
            for start in range(0, short, self.window_size):
                for row, column in ((start + offset, start), (start, start + offset)):
                    left = math.floor(column * ratio)
                    right = math.floor(column * ratio + width)
                    mask[row : row + height, left:right] = True
        return _with_global(mask if columns > rows else mask.T, self.gtoken)

    def _ratio(self, short: int, long: int) -> float:
        ratio = long / short
        return round(ratio) if abs(ratio - round(ratio)) < _INTEGER_RATIO_MARGIN else ratio

    def _height(self) -> int:
        return self.window_size * self.step

    def _offset(self, stride: int, stripe: int) -> int:
        return stride * (2**stripe - 1)


@dataclass(frozen=True, kw_only=True)
class ButterflyGlobalSparsityConfig(NinjaTurtleSparsityConfig):
    """NinjaTurtleSparsityConfig with evenly spaced stripes, windows one `window_size` high."""

    def _ratio(self, short: int, long: int) -> float:
        return math.ceil(long / short)

    def _height(self) -> int:
        return self.window_size

    def _offset(self, stride: int, stripe: int) -> int:
        return stride * stripe


def _with_global(mask: np.ndarray, size: int) -> np.ndarray:
    mask = mask.copy()
    mask[:size] = True
    mask[:, :size] = True
    return mask


_PATTERNS: dict[str, type[SparsityConfig]] = {
    cls.__name__: cls
    for cls in (
        FlatBlockButterflySparsityConfig,
        BlockdiagSparsityConfig,
        NinjaTurtleSparsityConfig,
        ButterflyGlobalSparsityConfig,
    )
}


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
        mask = self.sparsity_config.mask(out_features, in_features)
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
