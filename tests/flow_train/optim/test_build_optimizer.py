"""Optimizers built from configurations, against PyTorch's steps."""

from __future__ import annotations

import os
from functools import partial

import oneflow_accel
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.checkpoint.optimizer_state import EAGER_KEYS
from flow_train.optim import build_optimizer
from flow_train.steps.eager import EagerStep
from tests.tolerances import Tolerance, assert_close


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    oneflow_accel.select_device()


def test_five_steps_are_pytorchs(timm_golden):
    assert {case["config"]["name"] for case in timm_golden["optimizers"]} == {"adamw", "sgd"}
    for case in timm_golden["optimizers"]:
        model = nn.Linear(2, 3)
        for name, parameter in model.named_parameters():
            parameter.data = flow.tensor(np.array(case["start"][name], dtype=np.float32))
        optimizer = build_optimizer(model, case["config"])
        for grads in case["grads"]:
            for name, parameter in model.named_parameters():
                parameter.grad = flow.tensor(np.array(grads[name], dtype=np.float32))
            optimizer.step()
        for name, parameter in model.named_parameters():
            assert_close(
                parameter.detach().numpy(),
                np.array(case["end"][name]),
                override=Tolerance(2e-5, 2e-5),
                reason="five steps in a row, each rounded to float32",
            )


def test_groups_and_options():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    config = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.05, "momentum": None}
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, flow.optim.AdamW)
    decayed, other = optimizer.param_groups
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.05, 0.0)
    assert (len(decayed.parameters), len(other.parameters)) == (1, 3)
    assert (decayed["betas"], decayed["eps"], decayed["lr"]) == ((0.9, 0.999), 1e-8, 1e-3)
    grouping = {"bias_weight_decay": True, "normalization_weight_decay": True}
    (everything,) = build_optimizer(model, config, grouping).param_groups
    assert everything["weight_decay"] == 0.05
    sgd = build_optimizer(model, {"name": "SGD", "lr": 1, "momentum": 0.9})
    assert isinstance(sgd, flow.optim.SGD)
    assert sgd.param_groups[0]["momentum"] == 0.9
    for name, nesterov in (("nesterov", True), ("momentum", False)):
        timms = build_optimizer(model, {"name": name, "lr": 1, "momentum": 0.9})
        assert isinstance(timms, flow.optim.SGD)
        assert timms.param_groups[0]["nesterov"] is nesterov


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "adam", "lr": 1}, r"optimizer\.name='adam': it must be adamw or sgd"),
        ({"lr": 1, "weight_decy": 0.1}, r"weight_decy; did you mean optimizer\.weight_decay\?"),
        ({"lr": 1, "momentum": 0.9}, "optimizer: adamw has no option momentum"),
        ({"name": "sgd", "lr": 1, "amsgrad": True}, "optimizer: sgd has no option amsgrad"),
        ({"name": "nesterov", "lr": 1}, "nesterov needs a momentum above 0"),
        ({"weight_decay": 0.1}, r"optimizer\.lr is not set"),
        ({"lr": -1}, "lr=-1: it must be a number of at least 0"),
        ({"lr": 1, "betas": [0.9, 1.0]}, "betas=.* each a number of at least 0 and below 1"),
    ],
)
def test_wrong_configurations_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_optimizer(nn.Linear(2, 2), config)


def test_wrong_grouping_is_named():
    with pytest.raises(UserError, match=r"there is no key optimizer_param_grouping\.bias_decay"):
        build_optimizer(nn.Linear(2, 2), {"lr": 1}, {"bias_decay": True})


@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "RMSprop"])
def test_what_an_optimizer_keeps_is_saved_or_it_is_refused(kind: str) -> None:
    """Before anything is trained."""
    model, backend = nn.Linear(3, 2), oneflow_accel.select_device()
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}.get(kind, {})
    optimizer = getattr(flow.optim, kind)(model.parameters(), lr=0.1, **options)
    step = partial(EagerStep, model, backend, optimizer, nn.MSELoss())
    if kind == "RMSprop":
        with pytest.raises(UserError, match=f"do not know what {kind} keeps"):
            step()
        return
    taken = step()
    model(flow.ones(1, 3)).sum().backward()
    optimizer.step()
    kept = optimizer.state_dict()["state"][0]
    assert kept
    found = {EAGER_KEYS.get(key, key) for key, _ in map(os.path.split, taken.optimizer_arrays())}
    assert found == kept.keys()
