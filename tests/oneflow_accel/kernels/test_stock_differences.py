"""csrc/README.md's table of differences from stock OneFlow: with the plug-in and without."""

from __future__ import annotations

import json

from oneflow_accel import settings

import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin

# What each line of the table prints. NaN is null.
_LINES = """
import json, math
import oneflow_accel
import numpy as np
import oneflow as flow
from oneflow import nn

nan, inf = float("nan"), float("inf")

def rows(tensor):
    return [
        [None if math.isnan(v) else round(v, 4) for v in row] for row in tensor.numpy().tolist()
    ]

def moving_variance():
    norm = nn.BatchNorm1d(2).train()
    norm(flow.tensor([[1.0, 2.0]]))
    return rows(norm.running_var.unsqueeze(0))

results = {
    "softmax": rows(flow.softmax(flow.tensor([[nan, 0.0], [0.0, inf], [0.0, 0.0]]), 1)),
    "log_softmax": rows(flow.log_softmax(flow.tensor([[0.0, nan]]), 1)),
    "cross_entropy": rows(
        nn.functional.cross_entropy(
            flow.tensor([[nan, 0.0]]), flow.tensor([1]), reduction="none").unsqueeze(0)),
    "moving_variance": moving_variance(),
    "adaptive_avg_pool": rows(nn.AdaptiveAvgPool2d(1)(flow.zeros(1, 2, 0, 0)).flatten(1)),
}
print("lines " + json.dumps(results))
"""

TABLE = {
    # name: (with the plug-in, stock)
    "softmax": (
        [[None, None], [None, None], [0.5, 0.5]],
        lambda rows: rows[0][1] is not None and rows[1][0] is not None,
    ),
    "log_softmax": ([[None, None]], lambda rows: rows[0][0] is not None),
    "cross_entropy": ([[None]], lambda rows: rows[0][0] is not None),
    "moving_variance": ([[0.9, 0.9]], lambda rows: rows == [[None, None]]),
    "adaptive_avg_pool": ([[0.0, 0.0]], lambda rows: rows == [[None, None]]),
}


def _lines(switch: str) -> dict[str, object]:
    process = run_process(["-c", _LINES], env={settings.PLUGIN.name: switch})
    found = [line for line in process.stdout.splitlines() if line.startswith("lines ")]
    assert found, process.stdout
    return dict(json.loads(found[0].removeprefix("lines ")))


@pytest.fixture(scope="module")
def lines() -> tuple[dict[str, object], dict[str, object]]:
    return _lines("on"), _lines("off")


@pytest.mark.parametrize("name", TABLE)
def test_line(name: str, lines: tuple[dict[str, object], dict[str, object]]) -> None:
    ours, stock = lines
    wanted, differs = TABLE[name]
    assert ours[name] == wanted
    assert differs(stock[name]), stock[name]


# These end a process of stock kernels.
ABORTS = {
    "operand in the output": "x = flow.ones(3, 2) * 2; x.div_(x[0]); print('is', x.sum().item())",
    "convolution of an empty image": "x, weight = flow.zeros(1, 4, 0, 0), flow.zeros(3, 4, 1, 1); "
    "print(flow.nn.functional.conv2d(x, weight).numpy(), 'is 6.0')",
}


@pytest.mark.parametrize("name", ABORTS)
def test_line_that_ends_a_process_of_stock_kernels(name: str) -> None:
    code = f"import oneflow_accel\nimport oneflow as flow\n{ABORTS[name]}"
    ours = run_process(["-c", code])
    assert ours.returncode == 0, ours.stdout
    assert "is 6.0" in ours.stdout
    stock = run_process(["-c", code], env={settings.PLUGIN.name: "off"})
    assert stock.returncode < 0, stock.stdout
