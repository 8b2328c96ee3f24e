"""Converts weights, moments and moving averages in the middle of training.

Arrays are keyed as in checkpoints (`flow_train.checkpoint.folders`): parameters by name, the
optimizer's by a prefix and the parameter's name. Nothing here needs a module or a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.projection import moments
from monarch_flow.projection.report import LayerReport
from monarch_flow.projection.structure import Arrays, LayerSpec, Structure, joined
from monarch_flow.projection.structures import structure_of
from monarch_flow.projection.weights import Rule, densify_weights, layer_arrays, project_weights

# AdamW's averages of gradients and of their squares; SGD's momentum; AMSGrad's largest average.
FIRST_MOMENTS = ("exp_avg/", "momentum_buf/", "momentum/")
SECOND_MOMENTS = ("exp_avg_sq/", "max_exp_avg_sq/")
# The prefix of moving averages that are kept among the optimizer's arrays.
AVERAGES = "ema/"


@dataclass
class TrainingState:
    """The state that training with another kind of layers goes on from. `optimizer` is empty for a
    fresh one, `ema` where there were no moving averages; `reports` has one per converted layer."""

    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray] = field(default_factory=dict)
    ema: dict[str, np.ndarray] = field(default_factory=dict)
    layers: dict[str, LayerSpec] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)


def densify_training_state(
    model: Arrays,
    optimizer: Arrays,
    layers: Mapping[str, LayerSpec | Sequence[Any]],
    *,
    ema: Arrays | None = None,
) -> TrainingState:
    """The training state of the dense model that computes the same.

    Weights are multiplied out, so outputs and loss are as before up to rounding. For a moving
    average the averaged factors are multiplied out: what was validated stays what it was (it is not
    the average of the products). The optimizer's moments are estimated as `moments` derives: the
    first is the averaged gradient as far as the factors saw it, the second a rank-one estimate per
    piece, never below a floor nor below the square of the first. All other entries are kept, with
    their dtypes.

    Args:
        optimizer: arrays by prefix and parameter name: "exp_avg/", "exp_avg_sq/",
            "max_exp_avg_sq/", "momentum_buf/" or "momentum/"; "ema/" for moving averages that are
            kept here. May be empty.
        layers: structured layers by module name, as `structured_layers(model)` gives them, or
            sequences (kind, in_features, out_features, nblocks).

    Raises:
        UserError: an array is missing or has an unknown prefix, or a layer has no dense weight (a
            SparseLR layer with a trained gate); names it.
    """
    specs = {
        prefix: spec if isinstance(spec, LayerSpec) else LayerSpec(*spec)
        for prefix, spec in layers.items()
    }
    dense, reports = densify_weights(model, specs)
    groups, rest = _by_prefix(optimizer, _owned(specs))
    firsts = {
        prefix: _densify_moments(model, groups[prefix], prefix, specs)
        for prefix in FIRST_MOMENTS
        if prefix in groups
    }
    result = dict(rest)
    for prefix, group in groups.items():
        if prefix == AVERAGES:
            new = densify_weights(group, specs, buffers=model)[0]
        elif prefix in firsts:
            new = firsts[prefix]
        else:
            new = _densify_moments(model, group, prefix, specs, firsts.get(FIRST_MOMENTS[0]))
        result |= {prefix + name: array for name, array in new.items()}
    averages = densify_weights(ema, specs, buffers=model)[0] if ema else {}
    return TrainingState(dense, result, averages, {}, reports)


def project_training_state(
    model: Arrays, rules: Sequence[Rule], *, ema: Arrays | None = None
) -> TrainingState:
    """The start of training with structured layers from a dense model, see `project_weights`.

    Moving averages are projected like the weights. The optimizer starts afresh: two factors have
    other coordinates than a dense weight, whose moments do not say how fast each should move.
    """
    projected, layers, reports = project_weights(model, rules)
    averages: dict[str, np.ndarray] = {}
    if ema:
        averages = project_weights(ema, rules)[0]
        # Buffers such as layouts are not parameters.
        averages = {name: array for name, array in averages.items() if array.dtype.kind == "f"}
    return TrainingState(projected, {}, averages, layers, reports)


def _owned(specs: Mapping[str, LayerSpec]) -> set[str]:
    return {
        joined(prefix, name) for prefix, spec in specs.items() for name in structure_of(spec).names
    }


def _by_prefix(
    optimizer: Arrays, owned: set[str]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """The arrays by known prefix and parameter name, and those with other prefixes."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    rest = {}
    for key, array in optimizer.items():
        prefix, slash, name = key.partition("/")
        prefix += slash
        if prefix in (*FIRST_MOMENTS, *SECOND_MOMENTS, AVERAGES):
            groups.setdefault(prefix, {})[name] = array
        elif key in owned or name in owned:
            raise UserError(
                f"the optimizer's array {key!r} belongs to a structured layer, and what becomes of "
                "it in a dense one is known only for "
                f"{', '.join((*FIRST_MOMENTS, *SECOND_MOMENTS, AVERAGES))}; start the optimizer "
                "afresh"
            )
        else:
            rest[key] = array
    return groups, rest


def _densify_moments(
    model: Arrays,
    group: Arrays,
    prefix: str,
    specs: Mapping[str, LayerSpec],
    firsts: Arrays | None = None,
) -> dict[str, np.ndarray]:
    """One kind of moments, by parameter name of the dense model."""
    new: dict[str, np.ndarray] = {}
    for module, spec in specs.items():
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
    owned = _owned(specs)
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
