"""The matrix of a given rank nearest to a dense one (Eckart and Young 1936), in numpy."""

from __future__ import annotations

import numpy as np

from monarch_flow.projection.monarch import project_to_factors


def project_to_low_rank(weight: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors of a `LowRank` layer whose product is nearest to `weight` in the Frobenius norm.

    Returns lr_weight1 (R, n) and lr_weight2 (m, R) in the dtype of `weight`, computed in float64,
    the singular values split evenly; from R = min(m, n) on the product is `weight`. Raises
    ValueError where `weight` is not a matrix of floats or the rank is below 1, UserError where it
    holds NaN or infinity.
    """
    # A Monarch matrix of one block is one matrix of rank q.
    rows, columns = weight.shape
    blkdiag1, blkdiag2 = project_to_factors(weight, (1, rank, columns), (1, rows, rank))
    return blkdiag1[0], blkdiag2[0]


def low_rank_to_dense(lr_weight1: np.ndarray, lr_weight2: np.ndarray) -> np.ndarray:
    """The product (m, n) in the factors' dtype; sums are made in float64 and rounded once."""
    dense = lr_weight2.astype(np.float64) @ lr_weight1.astype(np.float64)
    return dense.astype(np.result_type(lr_weight1, lr_weight2))
