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


def under_graph(function: Function) -> nn.Graph:
    class Graph(nn.Graph):
        def build(self, x: flow.Tensor) -> flow.Tensor:
            return function(x)

    return Graph()


def shared_outputs() -> int:
    count = ctypes.CDLL(str(plugin.state().path)).oneflow_accel_shared_outputs
    count.restype = ctypes.c_int64
    return count()


def test_a_chain_of_operators_takes_two_places() -> None:
    def chain(x: flow.Tensor) -> flow.Tensor:
        for _ in range(10):
            x = flow.relu(x) + 1.0
        return x

    before = shared_outputs()
    x = flow.tensor(random(8, 16))
    np.testing.assert_array_equal(under_graph(chain)(x).numpy(), chain(x).numpy())
    # Of 20 outputs, all but the two first lie where another lay.
    assert shared_outputs() - before == 18


@pytest.mark.parametrize("seed", range(6))
def test_any_graph_computes_what_its_operators_do(seed: int) -> None:
    """Operators that read one or two of the outputs before them, at any distance, in two shapes,
    and runs of the graph that are queued one behind the other."""
    choose = np.random.default_rng(seed)
    plan = [(int(choose.integers(5)), *choose.random(2)) for _ in range(60)]

    def net(x: flow.Tensor) -> flow.Tensor:
        wide, narrow = [x], [x.sum(dim=1, keepdim=True)]
        for kind, first, second in plan:
            # Mostly late ones, so that the memory of early ones is free.
            a, b = (wide[int(len(wide) * share**0.2)] for share in (first, second))
            if kind == 0:
                narrow.append(flow.tanh(a.sum(dim=1, keepdim=True) + narrow[-1]))
            elif kind == 1:
                wide.append(flow.tanh(a * narrow[int(len(narrow) * second)]))
            elif kind == 2:
                wide.append(flow.relu(a) - 0.5)
            else:
                wide.append(flow.tanh(a + b))
        return wide[-1] + narrow[-1]

    inputs = [flow.tensor(random(32, 48, seed=seed + i)) for i in range(5)]
    before = shared_outputs()
    graph = under_graph(net)
    results = [graph(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(result.numpy(), net(x).numpy())
    assert shared_outputs() - before > 20
