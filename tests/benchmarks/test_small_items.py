"""The rows of small operations; stock OneFlow runs as it would without us."""

from __future__ import annotations

import oneflow as flow

from benchmarks.__main__ import Bench
from benchmarks.both import Both
from benchmarks.items import chosen_items


def test_every_item_runs() -> None:
    items = chosen_items(["small"], None)
    assert [item.kind for item in items] == ["chain", "item", "sum_item", "mlp_train"]
    for item in items:
        step = Both(flow).makers()[item.kind](**item.params)
        step()
        step()


def test_stock_oneflow_has_its_worker_thread() -> None:
    stock = Bench("python3", 1, 1, stock=True).stock
    assert stock is not None
    assert stock.env["ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"] == "1"
    assert stock.env["ONEFLOW_ACCEL_PLUGIN"] == "off"
