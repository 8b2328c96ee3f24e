"""Which structured layers there are: in a module, in a model, in a state dict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

from oneflow import nn

from monarch_flow.layers import (
    BlockdiagLinear,
    BlockSparseLinear,
    LowRank,
    MonarchLinear,
    SparseLRLinear,
    StructuredLinear,
)
from monarch_flow.projection.structures import GATE, LOW_RANK, SPARSE, Arrays, LayerSpec


def spec_of_module(module: nn.Module) -> LayerSpec | None:
    """What a layer is; None where it is no structured layer that is known here."""
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
    if isinstance(module, SparseLRLinear):
        sparse = spec_of_module(module.sparse)
        return LayerSpec("sparse_low_rank", *size, sparse=sparse, gated=module.gating)
    return None


def structured_layers(model: nn.Module) -> dict[str, LayerSpec]:
    """The structured layers of a model by module name, in the order of `named_modules`.

    A layer inside another one (the two parts of a SparseLR layer) belongs to that one.

    Raises:
        UserError: a layer is of a kind that is not known here.
    """
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

    What they do not tell is taken to be: no padding of the input (in_features is a multiple of the
    blocks), none of the output where there is no bias, no shuffle, and that a weight of three
    dimensions without a layout is a block-diagonal one.
    """
    found: dict[str, LayerSpec] = {}
    for name, array in state.items():
        prefix, _, last = name.rpartition(".")
        if last == "blkdiag1" and f"{prefix}.blkdiag2" in state:
            second = state[f"{prefix}.blkdiag2"]
            size = array.shape[0] * array.shape[2], second.shape[0] * second.shape[1]
            found[prefix] = _told(state, prefix, "monarch", size, array.shape[0])
        elif last == "lr_weight1" and f"{prefix}.lr_weight2" in state:
            size = array.shape[1], state[f"{prefix}.lr_weight2"].shape[0]
            found[prefix] = _told(state, prefix, "low_rank", size)
        elif last == "weight" and array.ndim == 3 and f"{prefix}.layout" in state:
            height, width = state[f"{prefix}.layout"].shape
            size = width * array.shape[2], height * array.shape[1]
            found[prefix] = _told(state, prefix, "block_sparse", size)
        elif last == "weight" and array.ndim == 3:
            blocks, rows, columns = array.shape
            size = blocks * columns, blocks * rows
            found[prefix] = _told(state, prefix, "blockdiag", size, blocks)
    for prefix in [name for name in found if f".{name}".endswith(f".{SPARSE[:-1]}")]:
        outer = prefix.removesuffix(SPARSE[:-1]).removesuffix(".")
        dot = f"{outer}." if outer else ""
        low_rank = found.get(dot + LOW_RANK[:-1])
        if low_rank is None:
            continue
        # The low-rank part is never padded, so it knows the sizes.
        size = low_rank.in_features, low_rank.out_features
        sparse = dataclasses.replace(found[prefix], in_features=size[0], out_features=size[1])
        gated = f"{dot}{GATE}weight" in state
        del found[prefix], found[dot + LOW_RANK[:-1]]
        found[outer] = LayerSpec("sparse_low_rank", *size, sparse=sparse, gated=gated)
    return found


def layers_to_json(layers: Mapping[str, LayerSpec]) -> str:
    """The layers as text, to be kept beside weights."""
    return json.dumps({name: dataclasses.asdict(spec) for name, spec in layers.items()})


def layers_from_json(text: str) -> dict[str, LayerSpec]:
    """The inverse.

    Raises:
        UserError: it is no such text.
    """
    try:
        return {str(name): _spec_from(values) for name, values in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"the description of the layers is corrupt: {error}") from error


def _spec_from(values: dict[str, Any]) -> LayerSpec:
    sparse = values.get("sparse")
    return LayerSpec(**{**values, "sparse": _spec_from(sparse) if sparse else None})


def _told(
    state: Arrays, prefix: str, kind: str, size: tuple[int, int], nblocks: int = 0
) -> LayerSpec:
    bias = state.get(f"{prefix}.bias")
    out_features = size[1] if bias is None else len(bias)
    return LayerSpec(kind, size[0], out_features, nblocks=nblocks)


def _is_inside(name: str, found: Mapping[str, LayerSpec]) -> bool:
    return any(name.startswith(f"{outer}." if outer else "") for outer in found)
