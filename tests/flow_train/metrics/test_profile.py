"""Profiles name what ran, and give each operator to the module whose code called it."""

from __future__ import annotations

import json

import oneflow_accel

import oneflow as flow
import pytest
from oneflow import nn

from flow_train.metrics.profile import Profiler


class Residual(nn.Module):
    """tanh(x) x^T x + linear(x): the products are its own, and come last in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tanh = nn.Tanh()

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return flow.matmul(flow.matmul(self.tanh(x), x.transpose(0, 1)), x) + self.linear(x)


def test_operators_and_modules(tmp_path):
    backend = oneflow_accel.select_device("cpu")
    model = nn.Sequential(nn.Linear(8, 8), Residual(), nn.Linear(8, 1))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    # Twice: one profile after another.
    for _ in range(2):
        with Profiler(model, backend, optimizer) as profiler:
            model(flow.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    calls = profiler.by_operator()
    # Forward once each; backward twice each, but for the first layer's input.
    assert calls["matmul"][0] == 3 * 5 - 1
    assert (calls["tanh"][0], calls["tanh_grad"][0], calls["sgd_update"][0]) == (1, 1, 6)
    found = profiler.by_module()
    for name in ("0", "1", "1.linear", "1.tanh", "2"):
        assert found[name]["forward"] > 0 < found[name]["backward"], name
    assert found["(optimizer)"]["forward"] > 0 == found["(optimizer)"]["backward"]
    busy = sum(seconds for _, seconds in calls.values())
    assert sum(sum(phases.values()) for phases in found.values()) == pytest.approx(busy)
    assert busy < profiler.seconds
    assert "tanh_grad" in profiler.operator_table(1, most=99)
    assert "Residual" in profiler.module_table(1)
    assert "step" not in vars(optimizer)
    assert not model[0]._forward_hooks
    profiler.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == {0, 1, 2}
    assert all(0 <= event["dur"] < 6e7 and event["ts"] >= 0 for event in spans)
    kinds = {event["name"]: event["cat"] for event in spans}
    assert (kinds["1.linear"], kinds["Sequential"]) == ("Linear", "Sequential")
