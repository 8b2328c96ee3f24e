"""Turns tokens into maps and maps into tokens; nothing else does.

Tokens (N, H W, C) are the places of a map row by row: token W r + c is the place in row r and
column c. A map (N, H, W, C) is the same memory as its tokens, so nothing is copied between
attention and convolutions. Images, and maps for OneFlow's own operators, are (N, C, H, W).
"""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow

# (rows, columns) of a map.
Grid = tuple[int, int]


def tokens_to_map(x: flow.Tensor, grid: Grid) -> flow.Tensor:
    """(N, H W, C) to (N, H, W, C)."""
    return x.reshape(x.shape[0], *grid, x.shape[2])


def map_to_tokens(x: flow.Tensor) -> flow.Tensor:
    """(N, H, W, C) to (N, H W, C)."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])


def maps_to_tokens(maps: Sequence[flow.Tensor]) -> flow.Tensor:
    """Maps (N, H, W, C) of one size to tokens (N, H W, sum of C), in the order of the maps."""
    return map_to_tokens(flow.cat(list(maps), dim=-1))


def channels_last(x: flow.Tensor) -> flow.Tensor:
    """(N, C, H, W) to a map (N, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def channels_first(x: flow.Tensor) -> flow.Tensor:
    """A map (N, H, W, C) to (N, C, H, W)."""
    return x.permute(0, 3, 1, 2)
