"""A graph that ends before OneFlow has entered it into the queue it is taken off at its end."""

from __future__ import annotations

import ctypes

from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
from oneflow import nn

from tests.launch import run_process
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


# A second on two cores, so that it has not ended when the plug-in is loaded.
_IN_FLIGHT = """
import os
os.environ["ONEFLOW_ACCEL_PLUGIN"] = "off"
from oneflow_accel.kernels import plugin
import oneflow as flow


class Products(flow.nn.Graph):
    def build(self, x):
        y = x
        for _ in range(30):
            y = flow.matmul(y, x)
        return y


graph, x = Products(), flow.eye(1024)
y = graph(x)
os.environ["ONEFLOW_ACCEL_PLUGIN"] = "on"
plugin.load.cache_clear()
print("loaded", plugin.load().loaded)
assert (y.numpy() == x.numpy()).all()
for _ in range(3):
    assert (graph(x).numpy() == x.numpy()).all()
print("done")
"""


def test_a_graph_under_way_when_the_plugin_is_loaded_ends() -> None:
    process = run_process(["-c", _IN_FLIGHT], timeout=60)
    assert "loaded True\ndone" in process.stdout
