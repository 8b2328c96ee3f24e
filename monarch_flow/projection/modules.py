"""Makes nn.Linear and nn.Conv2d structured and structured layers dense, in place, in any model."""

from __future__ import annotations

import re

from oneflow_accel import layouts
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearConfig, LinearLike, StructuredLinear, replace_linears
from monarch_flow.layers.config import replace_modules
from monarch_flow.layers.convolution import MonarchConv2d
from monarch_flow.layers.structured import fill
from monarch_flow.projection.state_dicts import LayerReport, densify_arrays, project_arrays
from monarch_flow.projection.structures import (
    LayerSpec,
    joined,
    spec_of_module,
    structure_of,
    structured_layers,
)


def project_model(
    model: nn.Module,
    config: LinearLike,
    include: str = "",
    exclude: str | None = None,
    kind: type = nn.Linear,
) -> list[LayerReport]:
    """Replace dense layers of a model by the nearest structured ones, in place.

    Layers that stand in several places stay one. Biases, dtypes, devices, modes and requires_grad
    are kept; an optimizer must be given the new parameters.

    Args:
        include: regular expression; a layer is replaced if it is found in its name, such as
            "blocks.0.mlp.fc1". The empty one is found in all.
        exclude: regular expression of names that stay dense, such as "head".
        kind: nn.Linear, or nn.Conv2d for convolutions of one group, by their unfolded kernels.

    Returns:
        A report per replaced layer; empty where the config is a dense one.

    Raises:
        UserError: the config is wrong, does not fit a layer's sizes or has no projection, or a
            weight holds NaN or infinity or is global; or as `replace_linears`. The model is
            unchanged.
    """
    chosen = LinearConfig.of(config)
    if chosen.is_dense:
        return []
    old = dict(model.named_modules())
    # For example the gate of a SparseLR layer.
    parts = [f"^{re.escape(name)}\\." for name in structured_layers(model)]
    stay = "|".join(parts + ([f"(?:{exclude})"] if exclude is not None else []))
    names = replace_linears(model, chosen, include, stay or None, kind=kind)
    new = dict(model.named_modules())
    reports = []
    try:
        for name in names:
            try:
                reports.append(_project_into(new[name], old[name], name))
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
    except BaseException:
        replace_modules(model, {id(new[name]): old[name] for name in names})
        raise
    return reports


def densify_model(model: nn.Module) -> list[LayerReport]:
    """Replace structured layers of a model, in place, by nn.Linear or nn.Conv2d that do the same.

    It has the same sizes, bias, dtype, device and mode, and trains where any of the structured
    weights does. All else stays; an optimizer must be given the new parameters. Returns a report
    per replaced layer. Raises UserError, and leaves the model unchanged, where a layer has no dense
    weight (a SparseLR layer with a gate) or global parameters, or the model is a layer itself.
    """
    if isinstance(model, StructuredLinear | MonarchConv2d):
        raise UserError(f"the model is one {type(model).__name__}: put it into an nn.Sequential")
    modules = dict(model.named_modules())
    reports, dense = [], {}
    for name, spec in structured_layers(model).items():
        try:
            linear, report = _densify(modules[name], spec, name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        owner = modules[name.rpartition(".")[0]]
        conv = isinstance(owner, MonarchConv2d)
        dense[id(owner if conv else modules[name])] = owner.as_dense(linear) if conv else linear
        reports.append(report)
    replace_modules(model, dense)
    return reports


def _project_into(new: nn.Module, old: nn.Module, name: str) -> LayerReport:
    layer = new.linear if isinstance(new, MonarchConv2d) else new
    spec = spec_of_module(layer)
    if spec is None:
        raise UserError(f"there is no projection onto {type(layer).__name__}")
    weight = layouts.standard_array("weight", _array(old.weight), old)
    weight = weight.reshape(len(weight), -1)
    projected, report = project_arrays(name, spec, weight, _arrays(layer))
    parameters = dict(layer.named_parameters())
    for key, array in projected.items():
        fill(parameters[key], array)
        parameters[key].requires_grad_(old.weight.requires_grad)
    if old.bias is not None:
        fill(new.bias, _array(old.bias))
        new.bias.requires_grad_(old.bias.requires_grad)
    return report


def _densify(module: nn.Module, spec: LayerSpec, name: str) -> tuple[nn.Linear, LayerReport]:
    arrays = {joined(name, key): array for key, array in _arrays(module).items()}
    weight, report = densify_arrays(name, spec, arrays)
    parameters = dict(module.named_parameters())
    replaced = [parameters[key] for key in structure_of(spec).names]
    place = {"device": replaced[0].device, "dtype": replaced[0].dtype}
    bias = module.bias
    linear = nn.Linear(spec.in_features, spec.out_features, bias=bias is not None, **place)
    fill(linear.weight, weight)
    linear.weight.requires_grad_(any(parameter.requires_grad for parameter in replaced))
    if bias is not None:
        fill(linear.bias, _array(bias))
        linear.bias.requires_grad_(bias.requires_grad)
    return linear.train(module.training), report


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: _array(tensor) for name, tensor in module.state_dict().items()}


def _array(tensor: flow.Tensor) -> np.ndarray:
    if tensor.is_global:
        raise UserError("its parameters are global: convert the model before it is made global")
    return tensor.detach().numpy()
