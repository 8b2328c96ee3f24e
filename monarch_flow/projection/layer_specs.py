"""Finds the structured layers in a module, a model or a state dict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from oneflow import nn

from monarch_flow.layers import (
    BlockdiagLinear,
    BlockSparseLinear,
    LowRank,
    MaskedLinear,
    MonarchLinear,
    SparseLRLinear,
    StructuredLinear,
)
from monarch_flow.projection.blended import GATE, LOW_RANK, SPARSE
from monarch_flow.projection.structure import Arrays, LayerSpec, joined


def spec_of_module(module: nn.Module) -> LayerSpec | None:
    """What a layer is; None where it is not a structured layer known here."""
    if not isinstance(module, StructuredLinear):
        return None
    size = module.in_features, module.out_features
    if isinstance(module, MonarchLinear):
        return LayerSpec("monarch", *size, nblocks=module.nblocks)
    if isinstance(module, BlockdiagLinear):
        return LayerSpec("blockdiag", *size, nblocks=module.nblocks, shuffle=module.shuffle)
    if isinstance(module, LowRank):
        return LayerSpec("low_rank", *size)
    if isinstance(module, BlockSparseLinear):
        return LayerSpec("block_sparse", *size)
    if isinstance(module, MaskedLinear):
        pattern = json.dumps(module.sparsity_config.to_dict(), sort_keys=True)
        return LayerSpec("masked", *size, pattern=pattern)
    if isinstance(module, SparseLRLinear):
        dense = type(module.sparse) is nn.Linear
        sparse = LayerSpec("dense", *size) if dense else spec_of_module(module.sparse)
        gated = module.gate is not None
        return LayerSpec("sparse_low_rank", *size, sparse=sparse, gated=gated)
    return None


def structured_layers(model: nn.Module) -> dict[str, LayerSpec]:
    """The structured layers of a model by module name, in the order of `named_modules`. The two
    parts of a SparseLR layer belong to that one. Raises UserError for an unknown kind."""
    found: dict[str, LayerSpec] = {}
    for name, module in model.named_modules():
        if not isinstance(module, StructuredLinear) or _is_inside(name, found):
            continue
        spec = spec_of_module(module)
        if spec is None:
            raise UserError(f"{name} is a {type(module).__name__}, which cannot be made dense")
        found[name] = spec
    return found


def find_layers(state: Arrays) -> dict[str, LayerSpec]:
    """The structured layers that the names and shapes in a state dict tell of.

    The rest is assumed: no padding of the input (in_features is a multiple of the blocks), none of
    the output where there is no bias, no shuffle, no mask, and that a weight of three dimensions
    without a layout is block-diagonal. Raises UserError where an array has other axes than its name
    implies.
    """
    found: dict[str, LayerSpec] = {}
    for name, array in state.items():
        prefix, _, last = name.rpartition(".")
        beside = {
            key: state.get(joined(prefix, key)) for key in ("blkdiag2", "lr_weight2", "layout")
        }
        blocks, size, kind = 0, (0, 0), ""
        _check_axes(prefix, last, array, beside)
        if last == "blkdiag1" and (other := beside["blkdiag2"]) is not None:
            kind, blocks = "monarch", array.shape[0]
            size = blocks * array.shape[2], other.shape[0] * other.shape[1]
        elif last == "lr_weight1" and (other := beside["lr_weight2"]) is not None:
            kind, size = "low_rank", (array.shape[1], other.shape[0])
        elif last == "weight" and array.ndim == 3 and (other := beside["layout"]) is not None:
            kind = "block_sparse"
            size = other.shape[1] * array.shape[2], other.shape[0] * array.shape[1]
        elif last == "weight" and array.ndim == 3:
            kind, blocks = "blockdiag", array.shape[0]
            size = blocks * array.shape[2], blocks * array.shape[1]
        if kind:
            bias = state.get(joined(prefix, "bias"))
            rows = size[1] if bias is None else len(bias)
            found[prefix] = LayerSpec(kind, size[0], rows, nblocks=blocks)
    _combine_parts(state, found)
    return found


def _check_axes(
    prefix: str, last: str, array: np.ndarray, beside: Mapping[str, np.ndarray | None]
) -> None:
    for name, other, axes in (
        ("blkdiag1", "blkdiag2", (3, 3)),
        ("lr_weight1", "lr_weight2", (2, 2)),
        ("weight", "layout", (3, 2)),
    ):
        partner = beside[other]
        if last == name and partner is not None and (array.ndim, partner.ndim) != axes:
            raise UserError(
                f"{prefix}: {name} {array.shape} and {other} {partner.shape} are to have "
                f"{axes[0]} and {axes[1]} axes"
            )


def _combine_parts(state: Arrays, found: dict[str, LayerSpec]) -> None:
    for prefix in [name for name in found if f".{name}.".endswith(f".{LOW_RANK}")]:
        outer = prefix.removesuffix(LOW_RANK[:-1]).removesuffix(".")
        # The low-rank part is never padded, so it knows the sizes.
        size = found[prefix].in_features, found[prefix].out_features
        sparse_name = joined(outer, SPARSE[:-1])
        if sparse_name in found:
            part = found.pop(sparse_name)
            sparse = dataclasses.replace(part, in_features=size[0], out_features=size[1])
        elif joined(sparse_name, "weight") in state:
            sparse = LayerSpec("dense", *size)
        else:
            continue
        del found[prefix]
        gated = joined(outer, f"{GATE}weight") in state
        found[outer] = LayerSpec("sparse_low_rank", *size, sparse=sparse, gated=gated)


def layers_to_json(layers: Mapping[str, LayerSpec]) -> str:
    """The layers as JSON, to keep beside weights."""
    return json.dumps({name: dataclasses.asdict(spec) for name, spec in layers.items()})


def layers_from_json(text: str) -> dict[str, LayerSpec]:
    """The inverse of `layers_to_json`; UserError for any other text."""
    try:
        return {str(name): _spec_from(values) for name, values in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"the description of the layers is corrupt: {error}") from error


def _spec_from(values: dict[str, Any]) -> LayerSpec:
    sparse = values.get("sparse")
    sizes = [values.get(key) for key in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"sizes {sizes}")
    return LayerSpec(**{**values, "sparse": _spec_from(sparse) if sparse else None})


def _is_inside(name: str, found: Mapping[str, LayerSpec]) -> bool:
    return any(name.startswith(f"{outer}." if outer else "") for outer in found)
