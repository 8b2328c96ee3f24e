"""DropPath: whole samples, the right share of them, seeds, nn.Graph."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import DropPath


def test_drops_whole_samples_and_scales_the_others() -> None:
    flow.manual_seed(0)
    layer, x = DropPath(0.3), flow.rand(4000, 3, 2) + 1
    factor = layer(x).numpy() / x.numpy()
    assert (np.ptp(factor.reshape(4000, 6), axis=1) < 1e-6).all()
    kept = factor[:, 0, 0] > 0
    np.testing.assert_allclose(factor[kept, 0, 0], 1 / 0.7, rtol=1e-6)
    # Four standard deviations.
    assert abs(kept.mean() - 0.7) < 4 * np.sqrt(0.3 * 0.7 / 4000)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_ends(p: float) -> None:
    x = flow.rand(5, 4)
    np.testing.assert_array_equal(DropPath(p)(x).numpy(), x.numpy() * (1 - p))


def test_does_nothing_in_evaluation() -> None:
    x = flow.rand(5, 4)
    assert DropPath(0.9).eval()(x) is x


def test_follows_the_seed() -> None:
    layer, x, drawn = DropPath(0.5), flow.ones(64, 1), []
    for _ in range(2):
        flow.manual_seed(3)
        drawn.append(np.stack([layer(x).numpy() for _ in range(2)]))
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0][0] != drawn[0][1]).any()


def test_gradient_goes_through_kept_samples() -> None:
    flow.manual_seed(1)
    x = flow.ones(64, 3, requires_grad=True)
    y = DropPath(0.5)(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
    assert 0 < (y.numpy() == 0).sum() < 192


def test_draws_anew_in_a_graph() -> None:
    class Graph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.drop_path = DropPath(0.5)

        def build(self, x: flow.Tensor) -> flow.Tensor:
            return self.drop_path(x)

    flow.manual_seed(0)
    graph, x = Graph(), flow.ones(64, 2)
    first, second = graph(x).numpy(), graph(x).numpy()
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first[:, 0] == first[:, 1]).all()
    assert (first != second).any()


def test_a_global_batch() -> None:
    x = flow.ones(16, 3).to_global(flow.placement("cpu", [0]), flow.sbp.split(0))
    y = DropPath(0.5)(x)
    assert y.is_global
    assert set(np.unique(y.numpy())) <= {0.0, 2.0}


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_wrong_probability(p: float) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        DropPath(p)
