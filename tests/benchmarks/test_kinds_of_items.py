"""The rows of ViTAE and of small operations: what our side and stock OneFlow run."""

from __future__ import annotations

import inspect

import oneflow as flow

from benchmarks.__main__ import Bench
from benchmarks.both import Both
from benchmarks.items import all_items, chosen_items
from benchmarks.ours import models
from monarch_flow.models import list_models


def test_items_name_models_and_arguments_that_there_are() -> None:
    items = [item for item in all_items() if item.group == "vitae"]
    assert items
    for item in items:
        assert item.params["model"] in list_models()
        assert item.kind in models.MAKERS
        sizes = ("batch", "size", "dtype")
        made_of = {name: value for name, value in item.params.items() if name not in sizes}
        inspect.signature(models.vitae).bind(**made_of)
    # Every Monarch model is trained beside PyTorch's and, in turn, beside our own dense one.
    trained = [item for item in items if item.kind == "vitae_train" and item.precision == "float32"]
    over_dense = [item for item in trained if item.against]
    assert len(trained) == 3 * len(over_dense) > 0
    assert all(item.bar == 1.05 for item in over_dense)


def test_a_step_trains() -> None:
    train = models.MAKERS["vitae_train"]
    step = train(model="ViTAE_basic_Tiny", batch=1, size=32, monarch=True)
    step()


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
