"""LowRank: its factors against numpy's decomposition, its start values."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from monarch_flow.layers.low_rank import LowRank, low_rank_factors
from tests.tolerances import assert_close


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (24, 24)])
@pytest.mark.parametrize("rank", [1, 7, 24, 30])
def test_low_rank_factors_are_the_best(shape: tuple[int, int], rank: int) -> None:
    """Against numpy's own decomposition: same product, error as Eckart and Young have it."""
    matrix = np.random.default_rng(0).standard_normal(shape)
    left, right = low_rank_factors(matrix, rank)
    assert (left.shape, right.shape) == ((shape[0], rank), (rank, shape[1]))
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    kept = min(rank, 24)
    expected = (u[:, :kept] * s[:kept]) @ vt[:kept]
    np.testing.assert_allclose(left @ right, expected, atol=1e-9)
    # Divided evenly: both factors have the square roots of the singular values.
    np.testing.assert_allclose(np.linalg.norm(left, axis=0)[:kept], np.sqrt(s[:kept]), rtol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(right, axis=1)[:kept], np.sqrt(s[:kept]), rtol=1e-7)


def test_low_rank_factors_of_a_singular_matrix() -> None:
    left, right = low_rank_factors(np.zeros((4, 3)), 2)
    assert not left.any()
    assert not right.any()
    matrix = np.outer([1.0, 2, 3, 4], [1, 0, -1])
    left, right = low_rank_factors(matrix, 2)
    np.testing.assert_allclose(left @ right, matrix, atol=1e-12)


def test_low_rank_layer() -> None:
    layer = LowRank(768, 2304, 0.1)
    assert layer.rank == 76
    assert tuple(layer.lr_weight1.shape) == (76, 768)
    assert tuple(layer.lr_weight2.shape) == (2304, 76)
    np.testing.assert_allclose(np.abs(layer.lr_weight1.numpy()).max(), 768**-0.5, rtol=0.01)
    np.testing.assert_allclose(np.abs(layer.lr_weight2.numpy()).max(), 76**-0.5, rtol=0.01)
    np.testing.assert_allclose(np.abs(layer.bias.numpy()).max(), 768**-0.5, rtol=0.01)
    assert layer.macs_per_row() == 76 * (768 + 2304)


def test_low_rank_start_under_the_rule_of_a_model() -> None:
    """Spectral: the best approximation of the dense matrix that the rule fills."""
    drawn = np.random.default_rng(0).standard_normal((48, 32)).astype(np.float32)
    layer = LowRank(32, 48, 5)
    layer.reset_dense_init(lambda weight: weight.copy_(flow.tensor(drawn)))
    u, s, vt = np.linalg.svd(drawn, full_matrices=False)
    assert_close(layer.dense().numpy(), (u[:, :5] * s[:5]) @ vt[:5], reduced=48)
    np.testing.assert_array_equal(layer.bias.numpy(), 0)


@pytest.mark.parametrize(
    ("rank", "text"), [(0, "rank"), (0.01, "0.01"), (-1, "-1"), (True, "rank")]
)
def test_a_rank_below_one(rank: float, text: str) -> None:
    with pytest.raises(UserError, match=text):
        LowRank(32, 48, rank)
