"""Layers whose numbers are entries of the dense matrix: block-diagonal and block-sparse ones.

The nearest such matrix in the Frobenius norm holds the entries themselves, so projecting takes them
out and densifying puts them back, both exactly and in any dtype.
"""

from __future__ import annotations

import numpy as np


def project_to_blockdiag(weight: np.ndarray, nblocks: int, *, shuffle: bool = False) -> np.ndarray:
    """The diagonal blocks (nblocks, ceil(m / nblocks), ceil(n / nblocks)) of a matrix (m, n).

    `shuffle` says that the layer first permutes its (padded) input as ShuffleNet does: entry c
    nblocks + g takes the old g (n' / nblocks) + c.
    """
    rows, columns = -(-weight.shape[0] // nblocks), -(-weight.shape[1] // nblocks)
    padded = _padded(weight, nblocks * rows, nblocks * columns)
    if shuffle:
        padded = padded.reshape(-1, nblocks, columns).swapaxes(1, 2)
    grid = padded.reshape(nblocks, rows, nblocks, columns)
    index = np.arange(nblocks)
    return np.ascontiguousarray(grid[index, :, index])


def blockdiag_to_dense(
    blocks: np.ndarray, out_features: int, in_features: int, *, shuffle: bool = False
) -> np.ndarray:
    """The inverse: (out_features, in_features) with the blocks (nblocks, o, i) in it; ValueError
    where they are too small."""
    nblocks, rows, columns = blocks.shape
    grid = np.zeros((nblocks, rows, nblocks, columns), blocks.dtype)
    index = np.arange(nblocks)
    grid[index, :, index] = blocks
    full = grid.reshape(nblocks * rows, nblocks * columns)
    if shuffle:
        full = full.reshape(-1, columns, nblocks).swapaxes(1, 2).reshape(full.shape)
    return _cropped(full, out_features, in_features)


def project_to_block_sparse(weight: np.ndarray, layout: np.ndarray, block: int) -> np.ndarray:
    """The blocks of a matrix (m, n) that a layout (m' / block, n' / block) keeps. Returns (kept
    blocks, block, block), in the row-major order of the layout."""
    height, width = layout.shape
    rows, columns = np.nonzero(layout)
    grid = _padded(weight, height * block, width * block).reshape(height, block, width, block)
    return np.ascontiguousarray(grid[rows, :, columns])


def block_sparse_to_dense(
    blocks: np.ndarray, layout: np.ndarray, out_features: int, in_features: int
) -> np.ndarray:
    """The inverse: (out_features, in_features), zero outside of the layout; ValueError where
    blocks, layout and sizes do not fit."""
    rows, columns = np.nonzero(layout)
    count, block, _ = blocks.shape
    if count != len(rows):
        raise ValueError(f"{count} blocks for a layout that keeps {len(rows)}")
    grid = np.zeros((layout.shape[0], block, layout.shape[1], block), blocks.dtype)
    grid[rows, :, columns] = blocks
    full = grid.reshape(layout.shape[0] * block, layout.shape[1] * block)
    return _cropped(full, out_features, in_features)


def _padded(weight: np.ndarray, rows: int, columns: int) -> np.ndarray:
    if weight.ndim != 2 or weight.shape[0] > rows or weight.shape[1] > columns:
        raise ValueError(f"a weight of shape {weight.shape} does not fit into ({rows}, {columns})")
    padded = np.zeros((rows, columns), weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded


def _cropped(full: np.ndarray, out_features: int, in_features: int) -> np.ndarray:
    if full.shape[0] < out_features or full.shape[1] < in_features:
        raise ValueError(f"({out_features}, {in_features}) cannot be cropped from {full.shape}")
    return full[:out_features, :in_features].copy()
