"""Dense moments from those of factors: exact where they can be, close where they are estimates."""

from __future__ import annotations

import numpy as np
import pytest

from monarch_flow.projection import moments


def factors(random: np.random.Generator, s: int, p: int, rank: int) -> tuple[np.ndarray, ...]:
    return random.standard_normal((3, s, rank)), random.standard_normal((3, rank, p))


def transposed(matrix: np.ndarray) -> np.ndarray:
    return matrix.swapaxes(-1, -2)


def pulled_back(
    gradient: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return gradient @ transposed(right), transposed(left) @ gradient


def test_any_gradient_gives_its_projection_on_the_tangent_space() -> None:
    """And with it the formula m_B (A A^T)^+ A + B (B^T B)^+ m_A (I - A^T (A A^T)^+ A)."""
    random = np.random.default_rng(1)
    left, right = factors(random, 6, 5, 2)
    gradient = random.standard_normal((3, 6, 5))
    moment_left, moment_right = pulled_back(gradient, left, right)
    found = moments.first_moment(left, right, moment_left, moment_right)
    onto_rows = transposed(right) @ np.linalg.pinv(right @ transposed(right)) @ right
    onto_columns = left @ np.linalg.pinv(transposed(left) @ left) @ transposed(left)
    identity = np.eye(6), np.eye(5)
    orthogonal = (identity[0] - onto_columns) @ gradient @ (identity[1] - onto_rows)
    np.testing.assert_allclose(found, gradient - orthogonal, rtol=1e-9, atol=1e-10)
    formula = moment_left @ np.linalg.pinv(right @ transposed(right)) @ right
    formula += (
        left @ np.linalg.pinv(transposed(left) @ left) @ moment_right @ (identity[1] - onto_rows)
    )
    np.testing.assert_allclose(found, formula, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dead", [False, True])
def test_moments_that_disagree_give_the_least_squares_solution_of_least_norm(dead: bool) -> None:
    """Against numpy's lstsq on the equations written out; also where a slot is zero in both."""
    random = np.random.default_rng(2)
    left, right = (factor[0] for factor in factors(random, 5, 4, 2))
    moment_left, moment_right = random.standard_normal((5, 2)), random.standard_normal((2, 4))
    if dead:
        left[:, 1], right[1] = 0.0, 0.0
        moment_left[:, 1], moment_right[1] = 0.0, 0.0
    # Row-major: vec(G A^T) = (I kron A) vec(G), vec(B^T G) = (B^T kron I) vec(G).
    equations = np.concatenate([np.kron(np.eye(5), right), np.kron(left.T, np.eye(4))])
    wanted = np.linalg.lstsq(
        equations, np.concatenate([moment_left.ravel(), moment_right.ravel()]), rcond=1e-10
    )[0]
    found = moments.first_moment(left, right, moment_left, moment_right)
    np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-9, atol=1e-10)


def test_second_moments_of_rank_one_are_recovered() -> None:
    random = np.random.default_rng(3)
    left, right = factors(random, 6, 5, 2)
    rows, columns = random.uniform(0.1, 9, (3, 6, 1)), random.uniform(0.1, 9, (3, 1, 5))
    variance = rows * columns
    squares = variance @ transposed(right**2), transposed(left**2) @ variance
    found = moments.second_moment(left, right, *squares)
    np.testing.assert_allclose(found, variance, rtol=1e-10)


def test_second_moments_of_general_gradients_have_the_right_size() -> None:
    """Without rank one it is an estimate: not negative, and of the right total within a factor."""
    random = np.random.default_rng(5)
    left, right = (factor[0] for factor in factors(random, 12, 10, 3))
    variance = random.uniform(0.0, 2, (12, 10)) ** 4
    squares = variance @ (right.T**2), (left.T**2) @ variance
    found = moments.second_moment(left, right, *squares)
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(variance.sum(), rel=0.3)
    assert not moments.second_moment(left, right, 0 * squares[0], 0 * squares[1]).any()


def test_unknown_second_moments_are_completed_as_rank_one() -> None:
    random = np.random.default_rng(6)
    variance = np.outer(random.uniform(1, 3, 6), np.ones(4))
    known = random.random((6, 4)) < 0.6
    known[2] = False
    completed = moments.complete(np.where(known, variance, 0.0), known)
    np.testing.assert_array_equal(completed[known], variance[known])
    assert (completed > 0).all()
    # A row's mean is known exactly here; only that of the whole is not.
    rows = known.any(axis=1)
    ratio = completed[rows] / variance[rows]
    assert ratio.max() / ratio.min() < 3
    np.testing.assert_array_equal(moments.complete(variance, known | True), variance)
    assert not moments.complete(np.zeros((2, 2)), np.eye(2) > 0).any()


def test_the_floor_is_positive_and_no_less_than_the_squared_first_moment() -> None:
    variance = np.array([[0.0, 4.0], [1e-9, 3.0]])
    floored = moments.with_floor(variance, np.array([[0.5, 0.0], [0.0, -2.0]]))
    np.testing.assert_allclose(floored, [[0.25, 4.0], [1.75e-3, 4.0]], rtol=1e-6)
    zero = moments.with_floor(np.zeros((2, 2)), None).astype(np.float32)
    assert (zero > 0).all()
    assert np.isfinite(1 / zero).all()
