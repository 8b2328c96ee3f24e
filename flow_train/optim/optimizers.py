"""Optimizers from their configuration, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import oneflow as flow
from oneflow import nn

from flow_train.config import keys
from flow_train.config.schema import read
from flow_train.optim.param_groups import group_parameters

_KINDS = {"adamw": flow.optim.AdamW, "sgd": flow.optim.SGD}


def build_optimizer(
    model: nn.Module, config: Mapping[str, Any], grouping: Mapping[str, Any] | None = None
) -> flow.optim.Optimizer:
    """The optimizer that `keys.Optimizer` describes, over the trainable parameters of a model on
    the device and in the layout to train in. AdamW is decoupled (Loshchilov and Hutter 2019).

    It has a group for the parameters with weight decay and one for those without (see
    `group_parameters`), the parameters of each sorted by name. UserError for an unknown name or
    key, a value of the wrong type or range, or no `lr`.
    """
    options = read(keys.Optimizer, config, "optimizer").model_dump(exclude_none=True)
    flags = read(keys.ParameterGrouping, grouping, "optimizer_param_grouping").model_dump()
    name, weight_decay = options.pop("name"), options.pop("weight_decay")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    groups = [
        {"params": list(group.parameters), "weight_decay": weight_decay if group.decayed else 0.0}
        for group in group_parameters(model, **flags)
    ]
    return _KINDS[name](groups, **options)
