"""A graph that ends before OneFlow has entered it into the queue it is taken off at its end."""

from __future__ import annotations

import ctypes

from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
from oneflow import nn

from tests.oneflow_accel.kernels.harness import needs_plugin, random

pytestmark = needs_plugin


def test_a_graph_that_ends_early_waits_for_its_beginning() -> None:
    library = ctypes.CDLL(str(plugin.state().path))

    class Relu(nn.Graph):
        def build(self, x: flow.Tensor) -> flow.Tensor:
            return flow.relu(x)

    x = random(4, 4)
    graph, tensor = Relu(), flow.tensor(x)
    graph(tensor).numpy()
    before = library.oneflow_accel_graph_waits()
    # Far longer than the graph takes: stock OneFlow takes it off an empty queue and dies.
    library.oneflow_accel_delay_graphs(20)
    try:
        results = [graph(tensor).numpy() for _ in range(3)]
    finally:
        library.oneflow_accel_delay_graphs(0)
    assert library.oneflow_accel_graph_waits() > before
    for result in results:
        np.testing.assert_array_equal(result, np.maximum(x, 0))
