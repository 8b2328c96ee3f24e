"""Outputs of an nn.Graph lie where others lay that nothing reads any more, and nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import needs_plugin, random

pytestmark = needs_plugin

Function = Callable[[flow.Tensor], flow.Tensor]
Net = Callable[[flow.Tensor], list[flow.Tensor]]


def step(net: Net, x: flow.Tensor, training: bool) -> list[flow.Tensor]:
    outputs = net(x)
    if training:
        sum(output.square().mean() for output in outputs).backward()
    return outputs


class Graph(nn.Graph):
    def __init__(self, net: Net, optimizer: flow.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.net = net
        if optimizer is not None:
            self.add_optimizer(optimizer)

    def build(self, x: flow.Tensor) -> list[flow.Tensor]:
        return step(self.net, x, self.training)


def shared_outputs() -> int:
    count = ctypes.CDLL(str(plugin.state().path)).oneflow_accel_shared_outputs
    count.restype = ctypes.c_int64
    return count()


@pytest.mark.parametrize(("function", "places"), [(flow.tanh, 2), (flow.relu, 1)])
def test_a_chain_of_operators_takes_one_place_or_two(function: Function, places: int) -> None:
    """One where its kernels can write over what they read."""

    def chain(x: flow.Tensor) -> list[flow.Tensor]:
        for _ in range(10):
            x = function(x) + 1.0
        return [x]

    before = shared_outputs()
    x = flow.tensor(random(8, 16))
    np.testing.assert_array_equal(Graph(chain)(x)[0].numpy(), chain(x)[0].numpy())
    assert shared_outputs() - before == 20 - places


class Any(nn.Module):
    """Operators that read one or two of the outputs before them, at any distance, in two shapes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = np.random.default_rng(seed)
        self.plan = [(int(choose.integers(6)), *choose.random(2)) for _ in range(60)]
        self.scale = nn.Parameter(flow.tensor(random(48, seed=seed)))

    def forward(self, x: flow.Tensor) -> list[flow.Tensor]:
        wide, narrow = [x], [x.sum(dim=1, keepdim=True)]
        for kind, first, second in self.plan:
            # Mostly late ones, so that the memory of early ones is free.
            a, b = (wide[int(len(wide) * share**0.2)] for share in (first, second))
            if kind == 0:
                narrow.append(flow.tanh(a.sum(dim=1, keepdim=True) + narrow[-1]))
            elif kind == 1:
                wide.append(flow.tanh(a * narrow[int(len(narrow) * second)]))
            elif kind == 2:
                wide.append(flow.relu(a) - 0.5)
            elif kind == 3:
                wide.append(flow.tanh(a * self.scale))
            elif kind == 4:
                wide.append(a * 0.5)
                wide[-1] += b
            else:
                wide.append(flow.tanh(a + b))
        return [wide[-1] + narrow[-1], wide[len(wide) // 2], narrow[0], x]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_graph_computes_what_its_operators_do(seed: int, training: bool) -> None:
    """Of several outputs, and runs of the graph that are queued one behind the other."""
    net, same = Any(seed), Any(seed)
    inputs = [flow.tensor(random(32, 48, seed=seed + i)) for i in range(5)]
    before = shared_outputs()
    with flow.set_grad_enabled(training):
        optimizer, others = (flow.optim.SGD(one.parameters(), lr=0.1) for one in (net, same))
        graph = Graph(same, others if training else None)
        results = [graph(x) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            for found, wanted in zip(result, step(net, x, training), strict=True):
                np.testing.assert_allclose(found.numpy(), wanted.detach().numpy(), atol=1e-5)
            if training:
                optimizer.step()
                optimizer.zero_grad()
    assert shared_outputs() - before > 20
