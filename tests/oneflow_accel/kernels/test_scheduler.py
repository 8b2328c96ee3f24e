"""OneFlow's scheduler thread sleeps, instead of polling, while an nn.Graph runs."""

from __future__ import annotations

import ctypes

from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
from oneflow import nn

from tests.oneflow_accel.kernels.harness import needs_plugin, random

pytestmark = needs_plugin


def test_the_scheduler_sleeps_while_a_graph_runs() -> None:
    naps = ctypes.CDLL(str(plugin.state().path)).oneflow_accel_naps
    naps.restype = ctypes.c_int64

    class Products(nn.Graph):
        def build(self, x: flow.Tensor) -> flow.Tensor:
            y = x
            for _ in range(20):
                y = flow.matmul(y, x)
            return y

    graph, tensor = Products(), flow.tensor(random(512, 512) / 30)
    first = graph(tensor).numpy()
    before = naps()
    second = graph(tensor).numpy()
    # 5 GFLOP take more than 10 ms on two cores, and no nap is longer than 0.5 ms.
    assert naps() - before >= 10
    np.testing.assert_array_equal(second, first)
