"""The rows of ViTAE: what our side runs, and what makes up a step of it."""

from __future__ import annotations

import inspect

import oneflow as flow

from benchmarks.breakdown import STEP, Breakdown
from benchmarks.items import all_items
from benchmarks.ours import models
from flow_train.metrics.macs import count_macs
from monarch_flow.models import create_model, list_models

NARROW = {
    "embed_dims": [8, 8, 16],
    "token_dims": [8, 16, 32],
    "depth": 2,
    "num_heads": 4,
    "conv_groups": 8,
    "num_classes": 5,
}


def test_items_name_models_and_arguments_that_there_are() -> None:
    items = [item for item in all_items() if item.group == "vitae"]
    for item in items:
        assert item.params["model"] in list_models()
        assert item.kind in models.MAKERS
        sizes = ("batch", "size", "dtype")
        made_of = {name: value for name, value in item.params.items() if name not in sizes}
        inspect.signature(models.vitae).bind(**made_of)
    # Every Monarch model beside PyTorch's and, in turn, beside our own dense one.
    training = [item for item in items if item.kind == "vitae_train"]
    mixed = [item for item in training if item.precision == "bfloat16"]
    assert [item.name for item in mixed] == ["dense vitae-tiny train b8, 224 px, bf16"]
    items.remove(mixed[0])
    trained = [item for item in items if item.kind == "vitae_train"]
    over_dense = [item for item in trained if item.against]
    assert len(trained) == 3 * len(over_dense) > 0
    assert all(item.bar == 1.05 for item in over_dense)
    # Inference of both, all beside PyTorch.
    inferred = [item for item in items if item.kind == "vitae_inference"]
    assert len(inferred) == 2 * 3
    assert all(item.peers and not item.against for item in inferred)
    assert len(trained) + len(inferred) == len(items)


def test_a_step_trains() -> None:
    train = models.MAKERS["vitae_train"]
    step = train(model="ViTAE_basic_Tiny", batch=1, size=32, monarch=True)
    step()


def test_the_parts_of_a_step() -> None:
    model = create_model("ViTAE_basic_Tiny", **NARROW, mlp_cfg="monarch").train()
    found = Breakdown(model, flow.randn(2, 3, 32, 32), lambda: None)
    found.round()
    rows = {row.kind: row for row in found.rows()}
    assert {kind: row.modules for kind, row in rows.items()} == {
        "embedding at several dilations": 3,
        "convolutions of reduction cells": 2,
        "performer": 2,
        "convolutions of normal cells": 2,
        "attention": 2,
        "MLP": 2,
        "layer norm": 4,
        "sums and maps of cells": 5,
        "head": 1,
        "optimizer": 1,
        "rest": 0,
        "whole step": 1,
    }
    macs = sum(row.macs for kind, row in rows.items() if kind != STEP)
    assert macs == rows[STEP].macs == count_macs(model, 32)
    assert rows["head"].macs == 32 * 5
    assert not [name for name in found.parts if ".RC.attn." in name]
