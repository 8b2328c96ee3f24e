"""Modules: nn.Linear made structured, structured layers made nn.Linear, in place, in any model."""

from __future__ import annotations

import re
from collections.abc import Callable

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearConfig, LinearLike
from monarch_flow.layers.structured import fill
from monarch_flow.projection.layer_specs import spec_of_module, structured_layers
from monarch_flow.projection.report import LayerReport, compare
from monarch_flow.projection.structures import structure_of
from monarch_flow.projection.weights import layer_arrays


def project_module(linear: nn.Linear, config: LinearLike) -> nn.Module:
    """The structured layer that is nearest to a dense one.

    Args:
        linear: its parameters are local tensors. It stays as it is.
        config: what `LinearConfig.of` takes.

    Returns:
        A layer of the same sizes, bias, dtype, device, mode and requires_grad; its factors are
        computed in float64. `linear` itself where the config is a dense one.

    Raises:
        UserError: the config is none, does not fit the sizes, or has no projection; the weight
            holds NaN or infinity, or is a global tensor.
    """
    return _project(linear, LinearConfig.of(config), "")[0]


def densify_module(module: nn.Module) -> nn.Linear:
    """The nn.Linear that computes what a structured layer does, up to rounding.

    Args:
        module: a layer of `monarch_flow.layers`; its parameters are local tensors. It stays as it
            is.

    Returns:
        A layer of the same sizes, bias, dtype, device and mode; it trains where any of the
        structured weights does.

    Raises:
        UserError: it is no such layer, has no dense weight (a SparseLR layer with a gate), or its
            parameters are global tensors.
    """
    return _densify(module, "")[0]


def project_model(
    model: nn.Module,
    config: LinearLike,
    include: str | None = None,
    exclude: str | None = None,
) -> list[LayerReport]:
    """Replace dense layers of a model by the nearest structured ones, in place.

    Args:
        model: any module; layers that stand in several places stay one.
        config: what `LinearConfig.of` takes.
        include: regular expression; a layer is replaced if it is found in its name (such as
            "blocks.0.mlp.fc1"). None for all.
        exclude: regular expression of names that stay dense, such as "head".

    Returns:
        A report per replaced layer; `report.total_relative_error` sums them up.

    Raises:
        UserError: as `project_module`; or the model is a layer itself. Names the layer. The model
            is unchanged.
    """
    linear_config = LinearConfig.of(config)
    patterns = [_pattern(text) for text in (include, exclude)]

    # Such as the gate of a SparseLR layer.
    inside = tuple(f"{name}." for name in structured_layers(model))

    def wanted(name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear) or linear_config.is_dense or name.startswith(inside):
            return False
        included = patterns[0] is None or patterns[0].search(name) is not None
        return included and (patterns[1] is None or patterns[1].search(name) is None)

    found = [name for name, module in model.named_modules() if wanted(name, module)]
    return _replace(model, found, lambda module, name: _project(module, linear_config, name))


def densify_model(model: nn.Module) -> list[LayerReport]:
    """Replace every structured layer of a model by the nn.Linear that computes the same, in place.

    Names, biases and everything else stay; an optimizer has to be given the new parameters.

    Returns:
        A report per replaced layer.

    Raises:
        UserError: as `densify_module`; or the model is a layer itself. Names the layer. The model
            is unchanged.
    """
    return _replace(model, list(structured_layers(model)), _densify)


def _project(
    linear: nn.Module, config: LinearConfig, name: str
) -> tuple[nn.Module, LayerReport | None]:
    if config.is_dense:
        return linear, None
    if not isinstance(linear, nn.Linear):
        raise UserError(f"a {type(linear).__name__} is no nn.Linear; nothing to project")
    weight = _array(linear.weight)
    out_features, in_features = weight.shape
    place = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    layer = config.build(in_features, out_features, bias=linear.bias is not None, **place)
    spec = spec_of_module(layer)
    if spec is None:
        raise UserError(f"there is no projection onto {config.target}")
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
    return layer.train(linear.training), compare(name, str(spec), weight, after, numbers)


def _densify(module: nn.Module, name: str) -> tuple[nn.Linear, LayerReport]:
    spec = spec_of_module(module)
    if spec is None:
        raise UserError(f"a {type(module).__name__} is no structured layer; nothing to make dense")
    structure = structure_of(spec)
    arrays = layer_arrays(_arrays(module), "", structure)
    exact = structure.exact_dense(arrays)
    parameters = dict(module.named_parameters())
    like = parameters[structure.names[0]]
    place = {"device": like.device, "dtype": like.dtype}
    bias = module.bias
    linear = nn.Linear(spec.in_features, spec.out_features, bias=bias is not None, **place)
    weight = exact.astype(arrays[structure.names[0]].dtype)
    fill(linear.weight, weight)
    trained = any(parameters[key].requires_grad for key in structure.names)
    linear.weight.requires_grad_(trained)
    if bias is not None:
        fill(linear.bias, _array(bias))
        linear.bias.requires_grad_(bias.requires_grad)
    numbers = sum(arrays[key].size for key in structure.names)
    return linear.train(module.training), compare(name, str(spec), exact, weight, numbers)


def _replace(
    model: nn.Module,
    names: list[str],
    make: Callable[[nn.Module, str], tuple[nn.Module, LayerReport | None]],
) -> list[LayerReport]:
    """Replace the named modules by what `make` gives for them; all or none."""
    if "" in names:
        raise UserError(
            f"the model is itself a {type(model).__name__}; use project_module or densify_module"
        )
    modules = dict(model.named_modules())
    reports: list[LayerReport] = []
    replaced: dict[int, nn.Module] = {}
    for name in names:
        try:
            new, report = make(modules[name], name)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        replaced[id(modules[name])] = new
        if report is not None:
            reports.append(report)
    # By parent and not by name: `named_modules` gives a module that stands in two places once.
    for parent in list(modules.values()):
        for key, child in list(parent._modules.items()):
            if id(child) in replaced:
                setattr(parent, key, replaced[id(child)])
    return reports


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UserError(f"{text!r} is no regular expression: {error}") from error


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: _array(tensor) for name, tensor in module.state_dict().items()}


def _array(tensor: flow.Tensor) -> np.ndarray:
    if tensor.is_global:
        raise UserError(
            "its parameters are global tensors; convert the model before it is made global"
        )
    return tensor.detach().numpy()
