"""Draws factors.png: a Monarch matrix as block-diagonal factors and permutations.

To draw it again: `python -m monarch_flow.figures.draw_factors [FILE]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot

BLOCKS = 4
SIDE = 4
FILE = Path(__file__).with_name("factors.png")


def permutation(rows: int, columns: int) -> np.ndarray:
    order = np.arange(rows * columns).reshape(rows, columns).T.ravel()
    return np.eye(rows * columns)[order]


def block_diagonal() -> np.ndarray:
    """Number of the block, from 1, on its entries; 0 elsewhere."""
    return np.kron(np.diag(np.arange(1.0, BLOCKS + 1)), np.ones((SIDE, SIDE)))


def painted(numbers: np.ndarray, name: str) -> np.ndarray:
    colors = matplotlib.colormaps[name](np.linspace(0.35, 0.85, BLOCKS))[:, :3]
    return np.concatenate([np.ones((1, 3)), colors])[numbers.astype(int)]


def draw(path: Path) -> None:
    blocks = block_diagonal()
    inner, outer = permutation(SIDE, BLOCKS), permutation(BLOCKS, SIDE)
    # The block of each factor that an entry of M comes from: each entry has one of either.
    second = (outer @ blocks).max(axis=1, keepdims=True)
    first = blocks.max(axis=0, keepdims=True)
    full = np.ones((BLOCKS * SIDE, BLOCKS * SIDE))
    assert ((outer @ (blocks > 0) @ inner @ (blocks > 0)) == full).all()
    mixed = (painted(first * full, "Blues") + painted(second * full, "Oranges")) / 2
    gray = np.array([0.25, 0.25, 0.25])
    panels = [
        (mixed, "M", "entries of one color: rank 1"),
        (1 - outer[..., None] * (1 - gray), "P", "block becomes the fast axis"),
        (painted(blocks, "Oranges"), "blkdiag2", "4 blocks of 4 x 4"),
        (1 - inner[..., None] * (1 - gray), "P", "grid is transposed"),
        (painted(blocks, "Blues"), "blkdiag1", "4 blocks of 4 x 4"),
    ]
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 2.7), layout="constrained")
    for place, (axis, (picture, title, below)) in enumerate(zip(axes, panels, strict=True)):
        axis.imshow(picture, interpolation="nearest")
        axis.set_title(title)
        axis.set_xlabel(below, fontsize=8)
        axis.set_xticks(np.arange(-0.5, BLOCKS * SIDE, SIDE), [])
        axis.set_yticks(np.arange(-0.5, BLOCKS * SIDE, SIDE), [])
        axis.grid(color="black", linewidth=0.4)
        axis.tick_params(length=0)
        if place:
            sign = "=" if place == 1 else r"$\cdot$"
            axis.text(-0.13, 0.5, sign, transform=axis.transAxes, ha="center", va="center", size=16)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
