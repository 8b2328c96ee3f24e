"""The one place where tokens become maps and maps become tokens.

Tokens (N, H W, C) are the places of a map (N, C, H, W) row by row: token W r + c is the place in
row r and column c.
"""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow

# (rows, columns) of a map.
Grid = tuple[int, int]


def tokens_to_map(x: flow.Tensor, grid: Grid) -> flow.Tensor:
    """(N, H W, C) to (N, C, H, W)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *grid)


def map_to_tokens(x: flow.Tensor) -> flow.Tensor:
    """(N, C, H, W) to (N, H W, C)."""
    return x.flatten(2).transpose(1, 2)


def maps_to_tokens(maps: Sequence[flow.Tensor]) -> flow.Tensor:
    """Maps of one size to tokens as wide as all their channels, those of the first map first."""
    return map_to_tokens(flow.cat(list(maps), dim=1))
