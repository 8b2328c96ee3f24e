"""Monarch matrices by their definition, entry by entry and in float64: what tests compare with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ORACLE = Path(__file__).resolve().parents[4] / "shared" / "docs" / "oracles" / "monarch_check.py"


def dense_by_slots(blkdiag1: np.ndarray, blkdiag2: np.ndarray) -> np.ndarray:
    """M[sigma l + lambda, kappa p + pi], a sum over the slots in the middle."""
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


def load_oracle() -> ModuleType:
    """The shared oracle; the test is skipped where it is not there."""
    if not ORACLE.is_file():
        pytest.skip("no shared data")
    spec = importlib.util.spec_from_file_location("monarch_oracle", ORACLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
