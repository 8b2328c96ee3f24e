"""Optimizers from their configuration, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.config.checked import checked_options, name_of
from flow_train.optim.param_groups import group_parameters


def _betas(value: Any) -> tuple[float, float]:
    first, second = (float(beta) for beta in value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError("expected two numbers from 0 to below 1")
    return first, second


def _not_negative(value: Any) -> float:
    number = float(value)
    if not number >= 0:
        raise ValueError("expected 0 or more")
    return number


@dataclass(frozen=True)
class _Kind:
    make: Callable[..., flow.optim.Optimizer]
    options: dict[str, Callable[[Any], Any]]


_COMMON = {"lr": _not_negative, "weight_decay": _not_negative}
_KINDS = {
    "adamw": _Kind(
        flow.optim.AdamW,
        {**_COMMON, "betas": _betas, "eps": _not_negative, "amsgrad": bool},
    ),
    "sgd": _Kind(
        flow.optim.SGD,
        {
            **_COMMON,
            "momentum": _not_negative,
            "dampening": _not_negative,
            "nesterov": bool,
        },
    ),
}


def build_optimizer(
    model: nn.Module,
    config: Mapping[str, Any],
    grouping: Mapping[str, Any] | None = None,
) -> flow.optim.Optimizer:
    """The optimizer that a configuration describes, over a model's trainable parameters.

    Args:
        model: on the device and in the layout to train in.
        config: `name` or `_target_` (AdamW or SGD, AdamW if neither is there), `lr` and what the
            optimizer takes besides. AdamW is decoupled (Loshchilov and Hutter 2019); its defaults
            are betas 0.9 and 0.999, eps 1e-8, weight decay 0.
        grouping: `bias_weight_decay` and `normalization_weight_decay`, see `group_parameters`;
            both are false where it is None.

    Returns:
        The optimizer. It has a group for the parameters with weight decay and one for those
        without, the parameters of each sorted by name.

    Raises:
        UserError: an unknown name or key, a value of the wrong type or range, or no `lr`.
    """
    name = name_of(config, _KINDS, {}, what="optimizer", default="adamw")
    kind = _KINDS[name]
    options = checked_options(config, kind.options, what=f"optimizer {name}")
    if "lr" not in options:
        raise UserError(f"optimizer.lr is missing: {name} needs a learning rate")
    flags = checked_options(
        grouping or {},
        {"bias_weight_decay": bool, "normalization_weight_decay": bool},
        what="optimizer_param_grouping",
    )
    weight_decay = options.pop("weight_decay", 0.0)
    groups = [
        {
            "params": list(group.parameters),
            "weight_decay": weight_decay if group.decayed else 0.0,
        }
        for group in group_parameters(model, **flags)
    ]
    return kind.make(groups, **options)
