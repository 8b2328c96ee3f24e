"""Makes layers structured or dense in whole state dicts and training states, by name.

Arrays are keyed as in checkpoints (`flow_train.checkpoint.folders`): parameters by name, the
optimizer's by a prefix and the parameter's name. Nothing here needs a module or a device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oneflow_accel.errors import UserError

import numpy as np

from flow_train.cli import text_table
from flow_train.optim import EMA_PREFIX as AVERAGES
from monarch_flow.layers import LinearConfig
from monarch_flow.layers.config import compiled
from monarch_flow.projection import moments
from monarch_flow.projection.structures import (
    Arrays,
    LayerSpec,
    Structure,
    joined,
    spec_of_module,
    structure_of,
)

Layers = Mapping[str, LayerSpec]
Rule = tuple[str, LinearConfig]

# AdamW's averages of gradients and of their squares; SGD's momentum; AMSGrad's largest average.
FIRST_MOMENTS = ("exp_avg/", "momentum_buf/", "momentum/")
SECOND_MOMENTS = ("exp_avg_sq/", "max_exp_avg_sq/")


@dataclass(frozen=True)
class LayerReport:
    """One converted layer.

    `name` is "" for a layer outside a model, `kind` is such as "monarch(4)", `numbers` counts the
    structured weights without the bias. `error` and `norm` are Frobenius norms of the difference
    and of the weight before.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    numbers: int
    error: float
    norm: float

    @property
    def relative_error(self) -> float:
        """error / norm; 0 where nothing is lost."""
        return self.error / self.norm if self.error else 0.0


def total_relative_error(reports: Sequence[LayerReport]) -> float:
    """The relative error of all weights together, as if they were one vector."""
    error = math.hypot(*(report.error for report in reports))
    return error / math.hypot(*(report.norm for report in reports)) if error else 0.0


def format_table(reports: Sequence[LayerReport]) -> str:
    rows = [("layer", "dense shape", "kind", "dense", "structured", "relative error")]
    for report in reports:
        size = report.out_features, report.in_features
        dense, error = f"{math.prod(size):,}", f"{report.relative_error:.3e}"
        rows.append((report.name, str(size), report.kind, dense, f"{report.numbers:,}", error))
    dense = f"{sum(report.out_features * report.in_features for report in reports):,}"
    structured = f"{sum(report.numbers for report in reports):,}"
    error = f"{total_relative_error(reports):.3e}"
    rows.append((f"{len(reports)} layers", "", "", dense, structured, error))
    return text_table(rows, "<<<>>>")


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


def densify_arrays(prefix: str, spec: LayerSpec, state: Arrays) -> tuple[np.ndarray, LayerReport]:
    """The dense weight (m, n) of one layer in a state dict, in the dtype of its arrays. Raises
    UserError where one is missing, or the layer has no dense weight."""
    structure = structure_of(spec)
    arrays = layer_arrays(state, prefix, structure)
    exact = structure.exact_dense(arrays)
    dense = exact.astype(arrays[structure.names[0]].dtype)
    return dense, _report(prefix, structure, arrays, exact, dense)


def project_arrays(
    prefix: str, spec: LayerSpec, weight: np.ndarray, arrays: Arrays
) -> tuple[dict[str, np.ndarray], LayerReport]:
    """The arrays of a layer nearest to a dense weight (m, n), in its dtype; `arrays`, of the layer
    as built, give shapes and buffers. Raises UserError for a weight with NaN or infinity."""
    structure = structure_of(spec)
    projected = structure.project(weight, arrays)
    after = structure.exact_dense({**arrays, **projected})
    return projected, _report(prefix, structure, projected, weight, after)


def _report(
    name: str, structure: Structure, arrays: Arrays, before: np.ndarray, after: np.ndarray
) -> LayerReport:
    """Compare a layer's dense weight (m, n) `before` and `after` in float64."""
    wide = before.astype(np.float64)
    error, norm = float(np.linalg.norm(wide - after)), float(np.linalg.norm(wide))
    numbers = sum(arrays[key].size for key in structure.names)
    rows, columns = before.shape
    return LayerReport(name, str(structure.spec), rows, columns, numbers, error, norm)


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
            weights[prefix], report = densify_arrays(prefix, spec, {**(buffers or {}), **state})
        except UserError as error:
            raise UserError(f"{prefix}: {error}") from error
        # numpy's way to say that shapes do not fit.
        except (ValueError, IndexError) as error:
            shapes = {name: state[joined(prefix, name)].shape for name in structure.names}
            raise UserError(
                f"{prefix}: its arrays do not fit each other and {spec.out_features} x "
                f"{spec.in_features}: {', '.join(f'{k} {v}' for k, v in shapes.items())} ({error})"
            ) from error
        reports.append(report)
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
    patterns = [(compiled(pattern), config) for pattern, config in rules]

    def chosen(module: str) -> LinearConfig | None:
        return next((config for pattern, config in patterns if pattern.search(module)), None)

    result: dict[str, np.ndarray] = {}
    layers: dict[str, LayerSpec] = {}
    reports: list[LayerReport] = []
    for name, array in state.items():
        prefix = name.removesuffix(".weight")
        is_matrix = prefix != name and array.ndim == 2 and array.dtype.kind == "f"
        config = chosen(prefix) if is_matrix else None
        if config is None or config.is_dense:
            result.setdefault(name, array)
            continue
        try:
            new = _project_layer(prefix, array, state.get(f"{prefix}.bias"), config)
        except UserError as error:
            raise UserError(f"{prefix}: {error}") from error
        arrays, layers[prefix], report = new
        result |= {joined(prefix, key): value for key, value in arrays.items()}
        reports.append(report)
    if not reports:
        factors = [
            name
            for name, array in state.items()
            if array.ndim == 3 and chosen(name.rpartition(".")[0]) is not None
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
    arrays = {name: value.numpy() for name, value in layer.state_dict().items()}
    projected, report = project_arrays(prefix, spec, weight, arrays)
    arrays |= projected
    if bias is not None:
        arrays["bias"] = bias
    return arrays, spec, report


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


@dataclass(frozen=True)
class TrainingState:
    """The state that training goes on from with dense layers, and a report per layer."""

    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    reports: list[LayerReport]


def densify_training_state(model: Arrays, optimizer: Arrays, layers: Layers) -> TrainingState:
    """The training state of the dense model that computes the same.

    Weights are multiplied out, so outputs and loss are as before up to rounding. For a moving
    average the averaged factors are multiplied out: what was validated stays what it was (it is not
    the average of the products). The optimizer's moments are estimated as `moments` derives: the
    first is the averaged gradient as far as the factors saw it, the second a rank-one estimate per
    piece, never below a floor nor below the square of the first. All other entries are kept, with
    their dtypes.

    Args:
        optimizer: arrays by prefix and parameter name: "exp_avg/", "exp_avg_sq/",
            "max_exp_avg_sq/", "momentum_buf/" or "momentum/"; "ema/" for moving averages. May be
            empty.
        layers: structured layers by module name, as `structured_layers(model)` gives them.

    Raises:
        UserError: an array is missing or has an unknown prefix, or a layer has no dense weight (a
            SparseLR layer with a trained gate); names it.
    """
    dense, reports = densify_weights(model, layers)
    groups, result = _by_prefix(optimizer, _owned(layers))
    firsts = {
        prefix: _densify_moments(model, groups[prefix], prefix, layers)
        for prefix in FIRST_MOMENTS
        if prefix in groups
    }
    for prefix, group in groups.items():
        if prefix == AVERAGES:
            new = densify_weights(group, layers, buffers=model)[0]
        elif prefix in firsts:
            new = firsts[prefix]
        else:
            new = _densify_moments(model, group, prefix, layers, firsts.get(FIRST_MOMENTS[0]))
        result |= {prefix + name: array for name, array in new.items()}
    return TrainingState(dense, result, reports)


def _owned(layers: Layers) -> set[str]:
    return {
        joined(prefix, name) for prefix, spec in layers.items() for name in structure_of(spec).names
    }


def _by_prefix(
    optimizer: Arrays, owned: set[str]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """The arrays by known prefix and parameter name, and those with other prefixes."""
    known = (*FIRST_MOMENTS, *SECOND_MOMENTS, AVERAGES)
    groups: dict[str, dict[str, np.ndarray]] = {}
    rest = {}
    for key, array in optimizer.items():
        prefix, slash, name = key.partition("/")
        if prefix + slash in known:
            groups.setdefault(prefix + slash, {})[name] = array
        elif key in owned or name in owned:
            raise UserError(
                f"the optimizer's array {key!r} belongs to a structured layer, and what becomes of "
                f"it in a dense one is known only for {', '.join(known)}; start the optimizer "
                "afresh"
            )
        else:
            rest[key] = array
    return groups, rest


def _densify_moments(
    model: Arrays, group: Arrays, prefix: str, layers: Layers, firsts: Arrays | None = None
) -> dict[str, np.ndarray]:
    """One kind of moments, by parameter name of the dense model."""
    new: dict[str, np.ndarray] = {}
    for module, spec in layers.items():
        structure = structure_of(spec)
        moment = _moments_of(group, module, structure, prefix)
        if moment is None:
            continue
        arrays = layer_arrays(model, module, structure)
        name = joined(module, "weight")
        if prefix in FIRST_MOMENTS:
            estimate = structure.first_moment(arrays, moment)
        else:
            first = firsts.get(name) if firsts else None
            estimate = moments.with_floor(structure.second_moment(arrays, moment), first)
        new[name] = estimate.astype(moment[structure.names[0]].dtype)
    owned = _owned(layers)
    return {**{name: array for name, array in group.items() if name not in owned}, **new}


def _moments_of(
    group: Arrays, module: str, structure: Structure, prefix: str
) -> dict[str, np.ndarray] | None:
    """A layer's moments by name inside it; None where it has none (frozen, or before a step)."""
    keys = {name: joined(module, name) for name in structure.names}
    found = [key for key in keys.values() if key in group]
    if not found:
        return None
    if len(found) < len(keys):
        missing = next(key for key in keys.values() if key not in group)
        raise UserError(f"the optimizer has {prefix}{found[0]} but no {prefix}{missing}")
    return {name: group[key] for name, key in keys.items()}
