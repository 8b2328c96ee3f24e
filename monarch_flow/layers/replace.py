"""Put structured layers into a model that somebody else wrote."""

from __future__ import annotations

import re

from oneflow_accel.errors import UserError

from oneflow import nn

from monarch_flow.layers.config import LinearConfig, LinearLike


def replace_linears(
    model: nn.Module, config: LinearLike = "monarch", include: str = "", exclude: str | None = None
) -> list[str]:
    """Replace nn.Linear layers of a model by fresh structured ones, in place; return their names.

    The new layers have the old ones' bias or none, device, dtype and training mode, but not their
    weights: `monarch_flow.projection` makes those. A layer that stands in several places stays one.
    Subclasses of nn.Linear are left alone.

    Args:
        include, exclude: regular expressions that are searched for in names of
            `model.named_modules()`; the empty `include` is found in all.

    Raises:
        UserError: no layer matches, the model is a layer itself, its parameters are global, or an
            expression or the config is wrong.
    """
    chosen_config = LinearConfig.of(config)
    wanted, unwanted = _compiled(include), _compiled(exclude)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if "" in linears:
        raise UserError("the model is one nn.Linear: build the new layer in its place")
    chosen = {
        name: module
        for name, module in linears.items()
        if wanted is not None
        and wanted.search(name)
        and not (unwanted is not None and unwanted.search(name))
    }
    if not chosen:
        raise UserError(
            f"no nn.Linear has a name that matches include={include!r} and not "
            f"exclude={exclude!r}; there are: {', '.join(linears) or 'none'}"
        )
    fresh = {id(old): _build_like(old, name, chosen_config) for name, old in chosen.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in fresh:
                setattr(parent, name, fresh[id(child)])
    return list(chosen)


def _compiled(expression: str | None) -> re.Pattern[str] | None:
    if expression is None:
        return None
    try:
        return re.compile(expression)
    except re.error as error:
        raise UserError(f"{expression!r} is no regular expression: {error}") from None


def _build_like(old: nn.Linear, name: str, config: LinearConfig) -> nn.Module:
    if old.weight.is_global:
        raise UserError(f"{name} has global parameters: replace layers before to_global")
    new = config.build(
        old.in_features,
        old.out_features,
        bias=old.bias is not None,
        device=old.weight.device,
        dtype=old.weight.dtype,
    )
    return new.train(old.training)
