"""Dropout and its factors: drawn, recorded, handed in; eagerly and in graphs."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.steps.random_factors import Site, given_factors, recorded_sites
from monarch_flow.layers import Dropout, DropPath, dropout
from tests.oneflow_accel.kernels.harness import Forward


class _Net(nn.Module):
    """Dropout, drop path and dropout again, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 5)
        self.drop1, self.path, self.drop2 = Dropout(0.5), DropPath(0.5), Dropout(0.25)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.drop2(x + self.path(self.second(self.drop1(self.first(x)))))


SITES = [Site((8, 3, 6), 0.5), Site((8, 1, 1), 0.5), Site((8, 3, 5), 0.25)]


def test_drops_the_right_share_and_scales_the_others() -> None:
    flow.manual_seed(0)
    x = flow.rand(200, 300) + 1
    factor = Dropout(0.2)(x).numpy() / x.numpy()
    assert set(np.round(np.unique(factor), 5)) == {0.0, 1.25}
    # Four standard deviations.
    assert abs((factor > 0).mean() - 0.8) < 4 * np.sqrt(0.2 * 0.8 / factor.size)


def test_ends_and_evaluation() -> None:
    x = flow.rand(5, 4)
    assert isinstance(dropout(0.0), nn.Identity)
    assert not Dropout(1.0)(x).numpy().any()
    assert Dropout(0.9).eval()(x) is x
    np.testing.assert_array_equal(Dropout(0.0)(x, x).numpy(), 2 * x.numpy())
    for p in (-0.1, 1.1):
        with pytest.raises(UserError, match="between 0 and 1"):
            dropout(p)


def test_calls_are_recorded_in_order_and_nothing_is_drawn() -> None:
    model, x = _Net(), flow.randn(8, 3, 5)
    flow.manual_seed(2)
    expected = flow.rand(4).numpy()
    flow.manual_seed(2)
    with recorded_sites(x.device) as sites:
        y = model(x)
    assert sites == SITES
    np.testing.assert_array_equal(flow.rand(4).numpy(), expected)
    np.testing.assert_array_equal(y.numpy(), model.eval()(x).numpy())


def test_given_factors_give_what_the_generator_does() -> None:
    """Output and gradients, bit for bit."""
    model = _Net()
    results = []
    for given in (False, True):
        x = flow.tensor(np.arange(120, dtype=np.float32).reshape(8, 3, 5), requires_grad=True)
        flow.manual_seed(5)
        if given:
            with given_factors([site.draw(x.device) for site in SITES]):
                y = model(x)
        else:
            y = model(x)
        y.sum().backward()
        results.append((y.numpy(), x.grad.numpy(), model.first.weight.grad.numpy()))
        model.zero_grad()
    for drawn, handed in zip(*results, strict=True):
        np.testing.assert_array_equal(handed, drawn)
    assert 0 < (results[0][0] == 0).sum() < 120


@pytest.mark.parametrize(
    ("sites", "text"),
    [
        pytest.param(SITES[:2], "number 2.*None is there", id="too-few"),
        pytest.param([*SITES, SITES[0]], "3 random factors, not 4", id="too-many"),
        pytest.param([SITES[1]], r"asks for \(8, 3, 6\), and \(8, 1, 1\)", id="other-shapes"),
    ],
)
def test_factors_that_do_not_fit(sites: list[Site], text: str) -> None:
    model, x = _Net(), flow.randn(8, 3, 5)
    factors = [site.draw(x.device) for site in sites]
    with pytest.raises(RuntimeError, match=text), given_factors(factors):
        model(x)
    # The next call is an ordinary one.
    model(x)


@pytest.mark.parametrize("layer", [Dropout, DropPath])
def test_layers_of_a_graph_draw_each_their_own_and_follow_the_seed(layer: type) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = layer(0.5), layer(0.5)

        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return flow.stack([self.one(x), self.other(x)])

    x = flow.ones(64, 1)
    drawn = []
    for seed in (3, 3, 4):
        flow.manual_seed(seed)
        # A user's graph, that is given no factors.
        graph = Forward(Two())
        drawn.append(np.stack([graph(x).numpy() for _ in range(2)]))
    first, again, other = drawn
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first[0] != first[1]).any()
    assert (first[:, 0] != first[:, 1]).any()


@pytest.mark.parametrize("layout", [flow.sbp.split(0), flow.sbp.broadcast, flow.sbp.partial_sum])
def test_global_tensors(layout: flow.sbp.sbp) -> None:
    x = flow.ones(16, 8, requires_grad=True).to_global(flow.placement("cpu", [0]), layout)
    y = Dropout(0.5)(x)
    assert y.is_global
    assert set(np.unique(y.to_global(sbp=flow.sbp.broadcast).to_local().numpy())) == {0.0, 2.0}
