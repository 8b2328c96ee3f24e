"""Monarch matrices by their definition, entry by entry and in float64: what tests compare with."""

from __future__ import annotations

import numpy as np


def dense_by_slots(blkdiag1: np.ndarray, blkdiag2: np.ndarray) -> np.ndarray:
    """The matrix (l s, k p) of the factors (k, q, p) and (l, s, r), slot by slot (spec, 1.1)."""
    k, q, p = blkdiag1.shape
    blocks2, s, _ = blkdiag2.shape
    dense = np.zeros((blocks2 * s, k * p))
    for slot in range(k * q):
        kappa, iota = divmod(slot, q)
        rho, residue = divmod(slot, blocks2)
        column = blkdiag2[residue, :, rho].astype(np.float64)
        dense[residue::blocks2, kappa * p : (kappa + 1) * p] += np.outer(
            column, blkdiag1[kappa, iota].astype(np.float64)
        )
    return dense


def monarch_gradients(
    x: np.ndarray, blkdiag1: np.ndarray, blkdiag2: np.ndarray, y_grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, blkdiag1 and blkdiag2 for rows x (b, k p) and y_grad (b, l s)."""
    k, q, p = blkdiag1.shape
    l, s, r = blkdiag2.shape  # noqa: E741
    rows = len(x)
    split = x.reshape(rows, k, p)
    first = np.einsum("bkp,kqp->bkq", split, blkdiag1)
    middle = first.reshape(rows, r, l).transpose(2, 0, 1)
    outer = y_grad.reshape(rows, s, l).transpose(2, 0, 1)
    blkdiag2_grad = np.einsum("lbs,lbr->lsr", outer, middle)
    middle_grad = np.einsum("lbs,lsr->lbr", outer, blkdiag2)
    first_grad = middle_grad.transpose(1, 2, 0).reshape(rows, k, q)
    blkdiag1_grad = np.einsum("bkq,bkp->kqp", first_grad, split)
    return (
        np.einsum("bkq,kqp->bkp", first_grad, blkdiag1).reshape(x.shape),
        blkdiag1_grad,
        blkdiag2_grad,
    )


def best_squared_error(
    weight: np.ndarray, shape1: tuple[int, ...], shape2: tuple[int, ...]
) -> float:
    """The least squared Frobenius distance, by Eckart and Young for each piece as it is cropped."""
    k, q, p = shape1
    blocks2, _, _ = shape2
    total = 0.0
    for kappa in range(k):
        for residue in range(blocks2):
            slots = range(kappa * q, (kappa + 1) * q)
            rank = sum(slot % blocks2 == residue for slot in slots)
            piece = weight[residue::blocks2, kappa * p : (kappa + 1) * p].astype(np.float64)
            if piece.size:
                values = np.linalg.svd(piece, compute_uv=False)
                total += float((values[rank:] ** 2).sum())
    return total
