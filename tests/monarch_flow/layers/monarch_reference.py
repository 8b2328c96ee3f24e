"""Monarch matrices in numpy, entry by entry, from the definition (spec, section 1.1)."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import pytest

from tests.launch import REPOSITORY

ORACLE = REPOSITORY.parent / "shared" / "docs" / "oracles" / "monarch_check.py"


def monarch_matrix(blkdiag1: np.ndarray, blkdiag2: np.ndarray) -> np.ndarray:
    """The dense matrix (l s, k p) of the factors (k, q, p) and (l, s, r)."""
    k, q, p = blkdiag1.shape
    l, s, _ = blkdiag2.shape  # noqa: E741 - the name in the formula
    dense = np.zeros((l * s, k * p))
    for slot in range(k * q):
        block1, row1 = divmod(slot, q)
        column2, block2 = divmod(slot, l)
        for row2 in range(s):
            dense[row2 * l + block2, block1 * p : (block1 + 1) * p] += (
                blkdiag2[block2, row2, column2] * blkdiag1[block1, row1]
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


def load_oracle() -> ModuleType:
    """The independent oracle, written by others from the mathematics alone."""
    if not ORACLE.is_file():
        pytest.skip("no shared data")
    spec = importlib.util.spec_from_file_location("monarch_check", ORACLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
