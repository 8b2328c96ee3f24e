"""Block-diagonal, block-sparse and low-rank projections."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import block_diag

from monarch_flow.projection.matrices import (
    entries_to_dense,
    project_to_block_sparse,
    project_to_blockdiag,
)


def blockdiag_to_dense(blocks: np.ndarray, *size: int, shuffle: bool) -> np.ndarray:
    def take(weight: np.ndarray) -> np.ndarray:
        return project_to_blockdiag(weight, len(blocks), shuffle=shuffle)

    return entries_to_dense(take, blocks, *size)


SIZES = [(12, 8, 4), (8, 12, 4), (7, 10, 4), (10, 7, 3), (5, 5, 1), (3, 2, 5)]


@pytest.mark.parametrize(("rows", "columns", "nblocks"), SIZES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_blockdiag_takes_and_puts_blocks(
    rows: int, columns: int, nblocks: int, shuffle: bool
) -> None:
    random = np.random.default_rng(0)
    height, width = -(-rows // nblocks), -(-columns // nblocks)
    blocks = random.standard_normal((nblocks, height, width))
    whole = block_diag(*blocks)
    if shuffle:
        # The layer multiplies with x[order]: place c nblocks + g has input g width + c.
        order = np.arange(nblocks * width).reshape(nblocks, width).T.ravel()
        unshuffled = np.zeros_like(whole)
        unshuffled[:, order] = whole
        whole = unshuffled
    dense = blockdiag_to_dense(blocks, rows, columns, shuffle=shuffle)
    np.testing.assert_array_equal(dense, whole[:rows, :columns])

    again = project_to_blockdiag(dense, nblocks, shuffle=shuffle)
    assert again.shape == blocks.shape
    np.testing.assert_array_equal(blockdiag_to_dense(again, rows, columns, shuffle=shuffle), dense)
    # Nearest: what is kept is the weight's own, what is not is zero in the class.
    weight = random.standard_normal((rows, columns)).astype(np.float32)
    kept = project_to_blockdiag(weight, nblocks, shuffle=shuffle)
    assert kept.dtype == np.float32
    pattern = blockdiag_to_dense(np.ones_like(blocks), rows, columns, shuffle=shuffle)
    np.testing.assert_array_equal(
        blockdiag_to_dense(kept, rows, columns, shuffle=shuffle), weight * pattern
    )


def test_block_sparse_takes_and_puts_blocks() -> None:
    random = np.random.default_rng(1)
    layout = np.array([[1, 0, 1], [0, 1, 0]])
    weight = random.standard_normal((5, 8))
    blocks = project_to_block_sparse(weight, layout, 3)
    assert blocks.shape == (3, 3, 3)
    mask = np.kron(layout, np.ones((3, 3)))[:5, :8]

    def take(weight: np.ndarray) -> np.ndarray:
        return project_to_block_sparse(weight, layout, 3)

    np.testing.assert_array_equal(entries_to_dense(take, blocks, 5, 8), weight * mask)
    with pytest.raises(ValueError, match=r"\(2, 3, 3\) for \(3, 3, 3\)"):
        entries_to_dense(take, blocks[:2], 5, 8)
    with pytest.raises(ValueError, match="does not fit"):
        project_to_block_sparse(np.ones((7, 8)), layout, 3)
