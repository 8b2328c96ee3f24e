"""Fixed patterns, as configs, of the blocks that a block-sparse matrix stores.

Each pattern is first an element mask of the whole matrix, then coarsened: a block is stored if any
of its elements is in the mask. Where the pattern's own tiles are not multiples of the block, more
than its nominal density is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers.targets import TARGET, check_positive, fill_options, split_target

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
            raise UserError(f"{value!r} is no sparsity config: give a mapping with '{TARGET}'")
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
