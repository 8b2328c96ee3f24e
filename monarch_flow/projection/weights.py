"""Makes layers structured or dense in whole state dicts, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers import LinearConfig
from monarch_flow.projection.layer_specs import spec_of_module
from monarch_flow.projection.report import LayerReport, compare
from monarch_flow.projection.structure import Arrays, LayerSpec, Structure, joined
from monarch_flow.projection.structures import structure_of

Layers = Mapping[str, LayerSpec]
Rule = tuple[str, LinearConfig]


def layer_arrays(state: Arrays, prefix: str, structure: Structure) -> dict[str, np.ndarray]:
    """The arrays of one layer by their name inside it; UserError where one is missing."""
    arrays = {}
    for name in (*structure.names, *structure.buffers):
        if joined(prefix, name) not in state:
            raise UserError(
                f"layer {prefix} ({structure.spec}) has no array {name!r}: these are not the "
                "weights of the model that was described"
            )
        arrays[name] = state[joined(prefix, name)]
    return arrays


def densify_weights(
    state: Arrays, layers: Layers, buffers: Arrays | None = None
) -> tuple[dict[str, np.ndarray], list[LayerReport]]:
    """The state dict of the dense model, and a report per layer.

    Each structured layer's arrays are replaced by its `weight`, in their dtype, in the place of the
    first of them; the rest stays. `buffers` has the layers' buffers where `state` has parameters
    only (such as moving averages). Raises UserError where an array is missing, or a layer has no
    dense weight.
    """
    owners: dict[str, str] = {}
    weights, reports = {}, []
    for prefix, spec in layers.items():
        structure = structure_of(spec)
        try:
            arrays = layer_arrays({**(buffers or {}), **state}, prefix, structure)
            exact = structure.exact_dense(arrays)
        except UserError as error:
            raise UserError(f"{prefix}: {error}") from error
        # numpy's way to say that shapes do not fit.
        except (ValueError, IndexError) as error:
            shapes = {name: state[joined(prefix, name)].shape for name in structure.names}
            raise UserError(
                f"{prefix}: its arrays do not fit each other and {spec.out_features} x "
                f"{spec.in_features}: {', '.join(f'{k} {v}' for k, v in shapes.items())} ({error})"
            ) from error
        numbers = sum(arrays[name].size for name in structure.names)
        dense = exact.astype(arrays[structure.names[0]].dtype)
        weights[prefix] = dense
        reports.append(compare(prefix, str(spec), exact, dense, numbers))
        owners |= {joined(prefix, name): prefix for name in (*structure.names, *structure.buffers)}
    result = {}
    for name, array in state.items():
        if name not in owners:
            result[name] = array
        elif owners[name] in weights:
            result[joined(owners[name], "weight")] = weights.pop(owners[name])
    return result, reports


def project_weights(
    state: Arrays, rules: Sequence[Rule]
) -> tuple[dict[str, np.ndarray], dict[str, LayerSpec], list[LayerReport]]:
    """The state dict nearest to a dense model's, its structured layers, and a report per layer.

    `rules` are pairs of a regular expression and the layer for the modules whose name it is found
    in; the first that fits is taken. Only weights that are matrices are layers. A new layer's
    arrays are in the order in which it registers them. Raises UserError where an expression is
    wrong or fits no layer, or a weight holds NaN or infinity.
    """
    patterns = [(_compiled(pattern), config) for pattern, config in rules]
    result: dict[str, np.ndarray] = {}
    layers: dict[str, LayerSpec] = {}
    reports: list[LayerReport] = []
    for name, array in state.items():
        prefix = name.removesuffix(".weight")
        if prefix != name and array.ndim == 2 and array.dtype.kind == "f":
            chosen = _first_rule(patterns, prefix)
            if chosen is not None and not patterns[chosen][1].is_dense:
                bias = state.get(f"{prefix}.bias")
                try:
                    new = _project_layer(prefix, array, bias, patterns[chosen][1])
                except UserError as error:
                    raise UserError(f"{prefix}: {error}") from error
                arrays, layers[prefix], report = new
                result |= {joined(prefix, key): value for key, value in arrays.items()}
                reports.append(report)
                continue
        result.setdefault(name, array)
    if not reports:
        factors = [
            name
            for name, array in state.items()
            if array.ndim == 3 and _first_rule(patterns, name.rpartition(".")[0]) is not None
        ]
        if factors:
            raise UserError(
                f"the layers are structured already ({factors[0]}); for other structures make them "
                "dense first, by python -m monarch_flow.convert densify"
            )
        names = [name.removesuffix(".weight") for name, array in state.items() if array.ndim == 2]
        raise UserError(
            f"no layer's name fits {' or '.join(repr(pattern) for pattern, _ in rules)}; the "
            f"matrices are: {', '.join(names[:12]) or 'none'}{' ...' if len(names) > 12 else ''}"
        )
    return result, layers, reports


def _project_layer(
    prefix: str, weight: np.ndarray, bias: np.ndarray | None, config: LinearConfig
) -> tuple[dict[str, np.ndarray], LayerSpec, LayerReport]:
    out_features, in_features = weight.shape
    layer = config.build(in_features, out_features, bias=bias is not None)
    spec = spec_of_module(layer)
    if spec is None:
        raise UserError(f"there is no projection onto {config.target}")
    structure = structure_of(spec)
    arrays = {name: value.numpy() for name, value in layer.state_dict().items()}
    arrays |= structure.project(weight, arrays)
    numbers = sum(arrays[name].size for name in structure.names)
    report = compare(prefix, str(spec), weight, structure.exact_dense(arrays), numbers)
    if bias is not None:
        arrays["bias"] = bias
    return arrays, spec, report


def _first_rule(patterns: Sequence[tuple[re.Pattern[str], LinearConfig]], name: str) -> int | None:
    return next((i for i, (pattern, _) in enumerate(patterns) if pattern.search(name)), None)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{pattern!r} is no regular expression: {error}") from error


def split_packed_projection(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The parts by name of a packed `*.qkv` tensor (rows in the order query, key, value), for
    attention with layers `*.q_proj`, `*.k_proj` and `*.v_proj`; another tensor by its own name."""
    match = re.fullmatch(r"(.*\.|)qkv\.(weight|bias)", name)
    if match is None:
        return {name: array}
    parts = zip(("q_proj", "k_proj", "v_proj"), np.split(array, 3), strict=True)
    return {f"{match[1]}{part}.{match[2]}": rows for part, rows in parts}


def split_packed_attention(state: Arrays) -> dict[str, np.ndarray]:
    """The state dict with each packed projection split; UserError where there is none."""
    result: dict[str, np.ndarray] = {}
    for name, array in state.items():
        result |= split_packed_projection(name, array)
    if len(result) == len(state):
        raise UserError("no layer is named qkv, so there is no packed attention to split")
    return result


def join_split_attention(state: Arrays) -> dict[str, np.ndarray]:
    """The inverse, for dense layers: `*.q_proj`, `*.k_proj` and `*.v_proj` become one `*.qkv`, in
    the place of the first. Names may have a prefix and a slash."""
    result: dict[str, np.ndarray] = {}
    for name, array in state.items():
        match = re.fullmatch(r"(.*[./]|)[qkv]_proj\.(weight|bias)", name)
        parts = [f"{match[1]}{part}_proj.{match[2]}" for part in "qkv"] if match else []
        if match is None or not all(part in state for part in parts):
            result[name] = array
        elif name == parts[0]:
            packed = np.concatenate([state[part] for part in parts])
            result[f"{match[1]}qkv.{match[2]}"] = packed
    return result
