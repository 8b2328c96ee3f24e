"""The rows of small operations: both sides do the same, and stock OneFlow runs as it would."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.__main__ import Bench
from benchmarks.items import chosen_items
from benchmarks.ours import small

PEERS = Path(small.__file__).parents[1] / "peers" / "small.py"


def test_both_sides_run_the_same_lines() -> None:
    """PyTorch is in another environment: its side is compared as text."""
    ours = Path(small.__file__).read_text().replace("oneflow as flow", "torch")
    ours = ours.replace("from oneflow", "from torch").replace("flow.", "torch.")
    bodies = [ast.parse(text).body[1:] for text in (ours, PEERS.read_text())]
    assert [ast.dump(node) for node in bodies[0]] == [ast.dump(node) for node in bodies[1]]


def test_every_item_runs() -> None:
    items = chosen_items(["small"], None)
    assert [item.kind for item in items] == ["chain", "mlp_train"]
    for item in items:
        step = small.MAKERS[item.kind](**item.params)
        step()
        step()


def test_stock_oneflow_has_its_worker_thread() -> None:
    stock = Bench("python3", 1, 1, stock=True).stock
    assert stock is not None
    assert stock.env["ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"] == "1"
    assert stock.env["ONEFLOW_ACCEL_PLUGIN"] == "off"
