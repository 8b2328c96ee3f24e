"""Makes nn.Linear layers structured and structured layers nn.Linear, in place, in any model."""

from __future__ import annotations

import re

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearConfig, LinearLike, StructuredLinear, replace_linears
from monarch_flow.layers.structured import fill
from monarch_flow.projection.layer_specs import spec_of_module, structured_layers
from monarch_flow.projection.report import LayerReport, compare
from monarch_flow.projection.structures import structure_of
from monarch_flow.projection.weights import layer_arrays


def project_module(linear: nn.Linear, config: LinearLike) -> nn.Module:
    """The structured layer that is nearest to a dense one, which stays as it is.

    Returns a layer of the same sizes, bias, dtype, device, mode and requires_grad, its factors
    computed in float64; `linear` itself where the config is a dense one. Raises UserError where the
    config is wrong, does not fit the sizes or has no projection, or the weight holds NaN or
    infinity or is global.
    """
    place = nn.Sequential(linear)
    project_model(place, config)
    return place[0]


def project_model(
    model: nn.Module, config: LinearLike, include: str = "", exclude: str | None = None
) -> list[LayerReport]:
    """Replace dense layers of a model by the nearest structured ones, in place.

    Layers that stand in several places stay one. Biases, dtypes, devices, modes and requires_grad
    are kept; an optimizer must be given the new parameters.

    Args:
        include: regular expression; a layer is replaced if it is found in its name, such as
            "blocks.0.mlp.fc1". The empty one is found in all.
        exclude: regular expression of names that stay dense, such as "head".

    Returns:
        A report per replaced layer; empty where the config is a dense one.

    Raises:
        UserError: as `project_module`, with the layer's name, or as `replace_linears`. The model is
            unchanged.
    """
    chosen = LinearConfig.of(config)
    if chosen.is_dense:
        return []
    old = dict(model.named_modules())
    # For example the gate of a SparseLR layer.
    parts = [f"^{re.escape(name)}\\." for name in structured_layers(model)]
    stay = "|".join(parts + ([f"(?:{exclude})"] if exclude is not None else []))
    names = replace_linears(model, chosen, include, stay or None)
    new = dict(model.named_modules())
    reports = []
    try:
        for name in names:
            try:
                reports.append(_project_into(new[name], old[name], name))
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
    except BaseException:
        _put_back(model, {id(new[name]): old[name] for name in names})
        raise
    return reports


def densify_module(module: nn.Module) -> nn.Linear:
    """The nn.Linear that computes what a structured layer does, up to rounding.

    It has the same sizes, bias, dtype, device and mode, and trains where any of the structured
    weights does; `module` stays as it is. Raises UserError for any other layer, one without a dense
    weight (a SparseLR layer with a gate) or with global parameters.
    """
    return _densify(module, "")[0]


def densify_model(model: nn.Module) -> list[LayerReport]:
    """Replace every structured layer of a model by the nn.Linear that computes the same, in place.

    All else stays; an optimizer must be given the new parameters. Returns a report per replaced
    layer. Raises UserError as `densify_module`, with the layer's name, or where the model is a
    layer itself; the model is then unchanged.
    """
    if isinstance(model, StructuredLinear):
        raise UserError(f"the model is one {type(model).__name__}: use densify_module")
    modules = dict(model.named_modules())
    reports, dense = [], {}
    for name in structured_layers(model):
        try:
            linear, report = _densify(modules[name], name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        dense[id(modules[name])] = linear
        reports.append(report)
    _put_back(model, dense)
    return reports


def _project_into(layer: nn.Module, linear: nn.Module, name: str) -> LayerReport:
    spec = spec_of_module(layer)
    if spec is None:
        raise UserError(f"there is no projection onto {type(layer).__name__}")
    weight = _array(linear.weight)
    structure = structure_of(spec)
    arrays = _arrays(layer)
    projected = structure.project(weight, arrays)
    parameters = dict(layer.named_parameters())
    for key, array in projected.items():
        fill(parameters[key], array)
        parameters[key].requires_grad_(linear.weight.requires_grad)
    if linear.bias is not None:
        fill(layer.bias, _array(linear.bias))
        layer.bias.requires_grad_(linear.bias.requires_grad)
    after = structure.exact_dense({**arrays, **projected})
    numbers = sum(array.size for array in projected.values())
    return compare(name, str(spec), weight, after, numbers)


def _densify(module: nn.Module, name: str) -> tuple[nn.Linear, LayerReport]:
    spec = spec_of_module(module)
    if spec is None:
        raise UserError(f"a {type(module).__name__} is no structured layer; nothing to make dense")
    structure = structure_of(spec)
    arrays = layer_arrays(_arrays(module), "", structure)
    exact = structure.exact_dense(arrays)
    weight = exact.astype(arrays[structure.names[0]].dtype)
    parameters = dict(module.named_parameters())
    like = parameters[structure.names[0]]
    place = {"device": like.device, "dtype": like.dtype}
    bias = module.bias
    linear = nn.Linear(spec.in_features, spec.out_features, bias=bias is not None, **place)
    fill(linear.weight, weight)
    trained = any(parameters[key].requires_grad for key in structure.names)
    linear.weight.requires_grad_(trained)
    if bias is not None:
        fill(linear.bias, _array(bias))
        linear.bias.requires_grad_(bias.requires_grad)
    numbers = sum(arrays[key].size for key in structure.names)
    return linear.train(module.training), compare(name, str(spec), exact, weight, numbers)


def _put_back(model: nn.Module, replacements: dict[int, nn.Module]) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in replacements:
                setattr(parent, key, replacements[id(child)])


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: _array(tensor) for name, tensor in module.state_dict().items()}


def _array(tensor: flow.Tensor) -> np.ndarray:
    if tensor.is_global:
        raise UserError("its parameters are global: convert the model before it is made global")
    return tensor.detach().numpy()
