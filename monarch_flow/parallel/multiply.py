"""The Monarch multiply with the blocks of both factors split over ranks.

Rank d of P holds blocks d k/P to (d+1) k/P - 1 of blkdiag1 and d l/P to (d+1) l/P - 1 of blkdiag2.
Stage 1 takes the features of the rank's own blocks, which lie side by side. Stage 2's block lambda
takes the slots t with t mod l = lambda, which come from all blocks of stage 1: this permutation is
the one exchange between the stages, an all-to-all. The output feature sigma l + lambda comes from
block lambda: as a grid (s, l) it is split over its last axis, that is, a rank has every feature
whose number mod l is in its range.

What works element by element (bias, GELU, dropout) takes the grid as it is. Another Monarch layer
needs features side by side, and each of its blocks has features of every residue: `features` turns
the grid by a second all-to-all, or gathers it where all ranks need all features. A layer that
instead took its blocks by residue would be another matrix.
"""

from __future__ import annotations

from oneflow_accel.errors import UserError

import oneflow as flow

from monarch_flow.parallel.relayout import relayout


def check_blocks(nblocks: int, ranks: int) -> None:
    """Raise UserError where the ranks cannot share the blocks; it names numbers that fit."""
    if nblocks % ranks == 0:
        return
    fitting = [size for size in range(1, nblocks + 1) if nblocks % size == 0]
    raise UserError(
        f"a Monarch layer of nblocks={nblocks} cannot be split over a tensor-parallel world size "
        f"of {ranks}: each process holds as many blocks; take an nblocks that {ranks} divides, "
        f"such as {-(-nblocks // ranks) * ranks}, or {', '.join(map(str, fitting))} processes"
    )


def split_multiply(
    x: flow.Tensor, blkdiag1: flow.Tensor, blkdiag2: flow.Tensor, axis: int
) -> flow.Tensor:
    """x M^T for the Monarch matrix M of two factors (Dao et al. 2022, section 3.1).

    The two batched products are plain operators, so that eager mode, nn.Graph and every device take
    them.

    Args:
        x: (..., k p), global; on `axis` split over its features, or whole, of which each rank takes
            its part without an exchange.
        blkdiag1: (k, q, p), split over k on `axis`.
        blkdiag2: (l, s, r), split over l on `axis`; l r = k q.

    Returns:
        The grid (..., s, l) of features s l, split over its last axis on `axis`.

    Raises:
        UserError: the ranks do not divide k or l.
    """
    blocks1, _, width1 = blkdiag1.shape
    blocks2, outer, width2 = blkdiag2.shape
    ranks = rank_count(x.placement, axis)
    for blocks in (blocks1, blocks2):
        check_blocks(blocks, ranks)
    lead = tuple(x.shape[:-1])
    x = relayout(x, axis, flow.sbp.split(x.ndim - 1))
    rows = x.reshape(-1, blocks1, width1).permute(1, 0, 2)
    slots = flow._C.matmul(rows, blkdiag1, transpose_b=True).permute(1, 0, 2)
    middle = exchange_slots(slots, blocks2, width2, axis)
    out = flow._C.matmul(middle, blkdiag2, transpose_b=True)
    return out.permute(1, 2, 0).reshape(*lead, outer, blocks2)


def exchange_slots(slots: flow.Tensor, blocks: int, width: int, axis: int) -> flow.Tensor:
    """The permutation between the factors, with `blocks` = l and `width` = r, l r = k q.

    Stage 1's `slots` (rows, k, q), split over k on `axis`, become stage 2's (l, rows, r), split
    over l: slot rho l + lambda at (lambda, rho).
    """
    if width % rank_count(slots.placement, axis):
        # A rank's slots end within a row of the grid, so no axis of the grid has their split.
        slots = relayout(slots, axis, flow.sbp.broadcast)
    grid = slots.reshape(-1, width, blocks).permute(2, 0, 1)
    return relayout(grid, axis, flow.sbp.split(0))


def features(grid: flow.Tensor, axis: int, *, split: bool) -> flow.Tensor:
    """The grid (..., s, l) of `split_multiply` as features (..., s l) side by side. `split` leaves
    each rank its part of them, where the ranks divide s; otherwise all ranks get all."""
    outer, blocks = grid.shape[-2:]
    split = split and outer % rank_count(grid.placement, axis) == 0
    grid = relayout(grid, axis, flow.sbp.split(grid.ndim - 2) if split else flow.sbp.broadcast)
    return grid.reshape(*grid.shape[:-2], outer * blocks)


def rank_count(placement: flow.placement, axis: int) -> int:
    return int(placement.ranks.shape[axis])
