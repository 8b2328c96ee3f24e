"""Projection onto Monarch matrices: exact inside the class, optimal outside, for every shape."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import pytest

from monarch_flow.layers import monarch_shapes
from monarch_flow.projection.matrices import (
    monarch_to_dense,
    project_to_factors,
    project_to_monarch,
)
from tests.monarch_flow.monarch_reference import best_squared_error, dense_by_slots
from tests.tolerances import assert_close

# In, out, nblocks: those of the models in small, and those that nblocks does not divide.
SHAPES = [
    (24, 72, 4),
    (72, 24, 4),
    (16, 16, 4),
    (10, 7, 4),
    (7, 10, 4),
    (9, 10, 4),
    (197, 384, 16),
    (5, 3, 8),
    (3, 5, 2),
    (1, 1, 3),
    (13, 29, 5),
    (64, 30, 1),
]


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(7)
    return [tuple(map(int, random.integers(1, (40, 40, 9)))) for _ in range(count)]


def random_factors(shape: tuple[int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    shape1, shape2 = monarch_shapes(*shape)
    return random.standard_normal(shape1), random.standard_normal(shape2)


def test_golden_matrices() -> None:
    first = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], float)
    second = np.array([[[1, 0], [2, 1]], [[1, 1], [0, 3]]], float)
    wanted = [[1, 2, 0, 0], [3, 4, 7, 8], [2, 4, 5, 6], [0, 0, 21, 24]]
    np.testing.assert_array_equal(monarch_to_dense(first, second), wanted)

    first = np.arange(1.0, 13.0).reshape(2, 3, 2)
    second = np.array([[[1, 2]], [[3, -1]], [[0, 1]]], float)
    wanted = [[1, 2, 14, 16], [9, 12, -9, -10], [0, 0, 11, 12]]
    np.testing.assert_array_equal(monarch_to_dense(first, second), wanted)


@pytest.mark.parametrize("shape", SHAPES + random_shapes(20))
def test_a_dense_by_slots_is_recovered_and_another_is_approximated_best(
    shape: tuple[int, int, int],
) -> None:
    inputs, outputs, nblocks = shape
    factors = random_factors(shape)
    dense = monarch_to_dense(*factors, outputs, inputs)
    assert_close(
        dense, dense_by_slots(*factors)[:outputs, :inputs], dtype="float64", reduced=inputs
    )

    recovered = project_to_monarch(dense, nblocks)
    assert [factor.shape for factor in recovered] == list(monarch_shapes(inputs, outputs, nblocks))
    assert_close(
        monarch_to_dense(*recovered, outputs, inputs), dense, dtype="float64", reduced=inputs
    )

    weight = np.random.default_rng(1).standard_normal((outputs, inputs))
    nearest = project_to_monarch(weight, nblocks)
    error = np.linalg.norm(weight - dense_by_slots(*nearest)[:outputs, :inputs])
    shapes = monarch_shapes(inputs, outputs, nblocks)
    wanted = np.sqrt(best_squared_error(weight, *shapes))
    assert error == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("rows", "columns", "blocks1", "blocks2", "rank"),
    [(24, 36, 6, 4, 2), (16, 16, 4, 4, 1), (25, 37, 6, 4, 2), (12, 20, 4, 4, 4), (6, 6, 2, 3, 9)],
)
def test_blocks_and_rank_to_choose(
    rows: int, columns: int, blocks1: int, blocks2: int, rank: int
) -> None:
    weight = np.random.default_rng(2).standard_normal((rows, columns))
    width, outer = -(-columns // blocks1), -(-rows // blocks2)
    shapes = (blocks1, rank * blocks2, width), (blocks2, outer, blocks1 * rank)
    factors = project_to_factors(weight, *shapes)
    assert tuple(factor.shape for factor in factors) == shapes
    error = np.linalg.norm(weight - monarch_to_dense(*factors, rows, columns))
    wanted = np.sqrt(best_squared_error(weight, *shapes))
    assert error == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    if rank >= min(width, outer):
        assert error < 1e-12


def test_the_fourier_matrix_is_monarch_of_rank_one() -> None:
    """Up to a permutation of its columns (Dao et al. 2022, section 3.2)."""
    for size, blocks1, blocks2 in ((36, 6, 6), (15, 5, 3)):
        fourier = np.fft.fft(np.eye(size), norm="ortho").T
        permuted = fourier[:, np.arange(size).reshape(-1, blocks1).T.ravel()]
        shapes = (blocks1, blocks2, blocks2), (blocks2, blocks1, blocks1)
        factors = project_to_factors(permuted, *shapes)
        assert factors[0].dtype == np.complex128
        np.testing.assert_allclose(monarch_to_dense(*factors), permuted, atol=1e-13)


@pytest.mark.parametrize("shape", [(24, 72, 4), (10, 7, 4)])
def test_float32_loses_one_rounding_only(shape: tuple[int, int, int]) -> None:
    inputs, outputs, nblocks = shape
    factors = [factor.astype(np.float32) for factor in random_factors(shape)]
    dense = monarch_to_dense(*factors, outputs, inputs)
    assert dense.dtype == np.float32
    wide = dense_by_slots(*factors)[:outputs, :inputs]
    np.testing.assert_array_equal(dense, wide.astype(np.float32))
    again = project_to_monarch(dense, nblocks)
    assert all(factor.dtype == np.float32 for factor in again)
    assert_close(monarch_to_dense(*again, outputs, inputs), wide, dtype="float32", reduced=4)


def test_bad_input_is_refused() -> None:
    weight = np.ones((4, 4))
    weight[1, 2] = np.nan
    with pytest.raises(UserError, match="NaN or infinity"):
        project_to_monarch(weight, 2)
    with pytest.raises(ValueError, match=r"got shape \(4,\)"):
        project_to_monarch(np.ones(4), 2)
    with pytest.raises(ValueError, match="dtype int64"):
        project_to_monarch(np.ones((4, 4), np.int64), 2)
    with pytest.raises(ValueError, match="nblocks must be at least 1"):
        project_to_monarch(np.ones((4, 4)), 0)
    with pytest.raises(ValueError, match="l r = k q"):
        project_to_factors(np.ones((4, 4)), (2, 2, 2), (2, 2, 3))
    with pytest.raises(ValueError, match="larger than"):
        project_to_factors(np.ones((5, 4)), (2, 2, 2), (2, 2, 2))
    with pytest.raises(ValueError, match="cannot be cropped"):
        monarch_to_dense(np.ones((2, 2, 2)), np.ones((2, 2, 2)), 5, 4)


def test_a_zero_matrix_has_zero_factors() -> None:
    for factor in project_to_monarch(np.zeros((6, 5), np.float32), 3):
        assert factor.dtype == np.float32
        assert not factor.any()
