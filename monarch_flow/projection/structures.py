"""What a structured layer is without a module: a description, and what its arrays mean.

A `LayerSpec` describes a layer, so that files and checkpoints can be converted where no module
exists; the arrays are those of its state dict, by their name inside the layer. `structure_of` tells
what they mean; `structured_layers` and `find_layers` find the layers of a model or a state dict.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import (
    BlockdiagLinear,
    BlockSparseLinear,
    ButterflyLinear,
    LinearConfig,
    LowRank,
    MaskedLinear,
    MonarchLinear,
    SparseLRLinear,
    StructuredLinear,
)
from monarch_flow.layers.block_sparse import SparsityConfig
from monarch_flow.layers.config import TARGET
from monarch_flow.layers.low_rank import low_rank_factors
from monarch_flow.layers.structured import fill
from monarch_flow.projection import moments
from monarch_flow.projection.matrices import (
    Shape3,
    entries_to_dense,
    merge_factors,
    merge_pieces,
    monarch_to_dense,
    project_to_block_sparse,
    project_to_blockdiag,
    project_to_factors,
    slot_table,
    split_factors,
    split_pieces,
)

Arrays = Mapping[str, np.ndarray]

SPARSE, LOW_RANK, GATE = "sparse.", "low_rank.", "gate."
# The alternating projections end after so many rounds, or one that changes less than this share.
# The first pair is for weights, whose last digits do not matter.
_ROUNDS = 30
_GAIN = 1e-3
_MOMENT_ROUNDS = 300
_MOMENT_CHANGE = 1e-7


@dataclass(frozen=True)
class LayerSpec:
    """A structured layer without its numbers.

    Attributes:
        kind: "monarch", "blockdiag", "low_rank", "block_sparse", "masked", "factors" or
            "sparse_low_rank"; for a part of the last one also "dense".
        in_features, out_features: n and m, without padding.
        nblocks: of "monarch" and "blockdiag"; for information only, as the arrays tell it.
        shuffle: of "blockdiag": whether the input is permuted first.
        sparse, gated: of "sparse_low_rank": the layer beside the low-rank one, and whether it has a
            gate.
        pattern: as JSON, as no array tells it: of "masked" its sparsity config; of "factors" the
            config of the layer, a butterfly or kaleidoscope.
    """

    kind: str
    in_features: int
    out_features: int
    nblocks: int = 0
    shuffle: bool = False
    sparse: LayerSpec | None = None
    gated: bool = False
    pattern: str = ""

    def __str__(self) -> str:
        details = f"({self.nblocks})" if self.nblocks else ""
        inside = f" of {self.sparse}" if self.sparse else ""
        return f"{self.kind}{details}{inside}"


class Structure(ABC):
    """What the arrays of one layer mean. `names` are the arrays that the dense weight replaces,
    `buffers` the others, without the bias, that a dense layer does not need."""

    names: tuple[str, ...]
    buffers: tuple[str, ...] = ()

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def dense(self, arrays: Arrays) -> np.ndarray:
        """The dense weight (m, n), in the arrays' dtype; UserError if the layer is not linear."""

    def exact_dense(self, arrays: Arrays) -> np.ndarray:
        """The dense weight (m, n) in float64, whatever dtype the arrays have."""
        return self.dense(
            {
                name: array.astype(np.float64) if array.dtype.kind == "f" else array
                for name, array in arrays.items()
            }
        )

    @abstractmethod
    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        """The arrays of `names` whose dense weight is nearest to `weight` (m, n), in its dtype;
        `arrays`, of the layer as built, give shapes and buffers."""

    @abstractmethod
    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """Estimate of the averaged gradient (m, n) from those of the arrays, see `moments`."""

    @abstractmethod
    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """Estimate of the averaged squares (m, n) of the gradient from those of the arrays."""

    def certain(self, arrays: Arrays) -> np.ndarray:
        """Which entries (m, n) of `second_moment` are certain and not estimates."""
        return np.zeros((self.spec.out_features, self.spec.in_features), bool)

    @abstractmethod
    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        """Float64 gradients of the arrays of `names`, from the dense weight's (m, n)."""


def joined(prefix: str, name: str) -> str:
    """The name of a layer's array in the whole state dict; "" is the whole itself."""
    return f"{prefix}.{name}" if prefix else name


class _Product(Structure):
    """Monarch: two factors, a product of low rank in each piece."""

    names = ("blkdiag1", "blkdiag2")

    def _factors(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        return arrays[self.names[0]], arrays[self.names[1]]

    def dense(self, arrays: Arrays) -> np.ndarray:
        size = self.spec.out_features, self.spec.in_features
        return monarch_to_dense(*self._factors(arrays), *size)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        return self._named(project_to_factors(weight, *map(_shape3, self._factors(arrays))))

    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        factors = self._factors(arrays)
        left, right = split_factors(*factors)
        shapes = _shape3(factors[0]), _shape3(factors[1])
        pieces = split_pieces(gradient, *shapes)
        pulled = pieces @ right.swapaxes(-1, -2), left.swapaxes(-1, -2) @ pieces
        return self._named(merge_factors(*pulled, *shapes))

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        split = split_factors(*self._factors(moment))
        return self._merge(moments.first_moment(*self._cropped_pieces(arrays), *split))

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        split = split_factors(*self._factors(moment))
        pieces = moments.second_moment(*self._cropped_pieces(arrays), *split)
        # A piece without a slot is zero for all factors.
        shape1, shape2 = map(_shape3, self._factors(arrays))
        used = slot_table(shape1[0], shape1[1], shape2[0])[1].any(axis=-1)
        known = self._merge(np.broadcast_to(used[..., None, None], pieces.shape))
        return moments.complete(self._merge(pieces), known)

    def _cropped_pieces(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Factors of each piece with zeros where they meet padding: the gradient is zero there, so
        those numbers say nothing about it."""
        factors = self._factors(arrays)
        left, right = split_factors(*factors)
        inside = split_pieces(
            np.ones((self.spec.out_features, self.spec.in_features)), *map(_shape3, factors)
        )
        return left * inside.max(axis=-1)[..., :, None], right * inside.max(axis=-2)[..., None, :]

    def _named(self, factors: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.names, factors, strict=True))

    def _merge(self, pieces: np.ndarray) -> np.ndarray:
        return merge_pieces(pieces, self.spec.out_features, self.spec.in_features)


class _LowRank(_Product):
    """One piece that is the whole matrix."""

    names = ("lr_weight1", "lr_weight2")

    def _factors(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        return arrays[self.names[0]][None], arrays[self.names[1]][None]

    def _named(self, factors: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: factor[0] for name, factor in zip(self.names, factors, strict=True)}


class _Entries(Structure):
    """Numbers that are entries of the dense weight, or padding."""

    names = ("weight",)

    @abstractmethod
    def _take(self, weight: np.ndarray, arrays: Arrays) -> np.ndarray:
        """The layer's numbers out of a matrix (m, n), 0 for padding."""

    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        size = self.spec.out_features, self.spec.in_features
        return entries_to_dense(lambda weight: self._take(weight, arrays), values, *size)

    def dense(self, arrays: Arrays) -> np.ndarray:
        return self._put(arrays["weight"], arrays)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        return {"weight": self._take(weight, arrays)}

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        return self._put(moment["weight"].astype(np.float64), arrays)

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        return moments.complete(self.first_moment(arrays, moment), self.certain(arrays))

    def certain(self, arrays: Arrays) -> np.ndarray:
        return self._put(np.ones(arrays["weight"].shape, bool), arrays)

    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        return self.project(gradient, arrays)


class _Blockdiag(_Entries):
    def _take(self, weight: np.ndarray, arrays: Arrays) -> np.ndarray:
        return project_to_blockdiag(weight, len(arrays["weight"]), shuffle=self.spec.shuffle)


class _BlockSparse(_Entries):
    buffers = ("layout",)

    def _take(self, weight: np.ndarray, arrays: Arrays) -> np.ndarray:
        return project_to_block_sparse(weight, arrays["layout"], arrays["weight"].shape[-1])


class _Masked(_Entries):
    """A dense weight and a mask, which is not in any checkpoint."""

    def _take(self, weight: np.ndarray, arrays: Arrays) -> np.ndarray:
        mask = SparsityConfig.of(json.loads(self.spec.pattern)).mask(*weight.shape)
        return np.where(mask, weight, np.zeros((), weight.dtype))


class _Dense(_Entries):
    def _take(self, weight: np.ndarray, arrays: Arrays) -> np.ndarray:
        return weight.copy()


class _Factors(Structure):
    """A product of butterfly factors: its dense matrix is known, the nearest such product and the
    moments of the matrix are not."""

    names = ("factors",)

    def dense(self, arrays: Arrays) -> np.ndarray:
        size, config = (
            (self.spec.in_features, self.spec.out_features),
            json.loads(self.spec.pattern),
        )
        layer = LinearConfig.of(config).build(*size, bias=False, dtype=flow.float64)
        fill(layer.factors, arrays["factors"])
        return layer.dense().numpy().astype(arrays["factors"].dtype)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        raise UserError(
            "neither the nearest butterfly factors to a matrix nor its moments are known: train "
            "such a layer from its own start, and make it dense without the optimizer's state"
        )

    first_moment = second_moment = pull_back = project  # type: ignore[assignment]


class Blended(Structure):
    """(1 - g) sparse + g low-rank, with g = 1/2, or g = sigmoid(gate(x)) where there is a gate.

    A gate with zero weight gives the same g for every input; with any other the layer is not linear
    and has neither a dense weight nor moments of one.
    """

    def __init__(self, spec: LayerSpec, sparse: Structure, low_rank: Structure) -> None:
        super().__init__(spec)
        self._parts = {SPARSE: sparse, LOW_RANK: low_rank}
        gate = ("gate.weight", "gate.bias") if spec.gated else ()
        self.names = (
            *(prefix + name for prefix, part in self._parts.items() for name in part.names),
            *gate,
        )
        self.buffers = tuple(SPARSE + name for name in sparse.buffers)

    def dense(self, arrays: Arrays) -> np.ndarray:
        dense = sum(share * part.exact_dense(own) for _, part, share, own in self._each(arrays))
        return np.asarray(dense).astype(arrays[self.names[0]].dtype)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        """Alternate between the nearest sparse and the nearest low-rank matrix to the other's rest.

        It starts from either part and takes the better end. No round makes it worse, but the end
        need not be the best of all. A gate's numbers become 0, so that it is half open for every
        input.
        """
        if not np.isfinite(weight).all():
            raise UserError("the weight holds NaN or infinity; there is nothing to project")
        own, rank = _inside(SPARSE, arrays), len(arrays[LOW_RANK + "lr_weight1"])
        target = 2 * weight.astype(np.float64)
        sparse_first = self._parts[SPARSE].project(target, own)
        starts = (self._parts[SPARSE].exact_dense({**own, **sparse_first}), np.zeros_like(target))
        ends = [self._alternate(target, start, own, rank) for start in starts]
        _, result = min(ends, key=lambda end: end[0])
        if self.spec.gated:
            result |= {name: np.zeros_like(arrays[name]) for name in ("gate.weight", "gate.bias")}
        return {name: array.astype(weight.dtype) for name, array in result.items()}

    def _alternate(
        self, target: np.ndarray, sparse: np.ndarray, own: Arrays, rank: int
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Distance to the target, and both parts' arrays, from a start of the sparse part."""
        part = self._parts[SPARSE]
        error = np.inf
        for _ in range(_ROUNDS):
            left, right = low_rank_factors(target - sparse, rank)
            kept = part.project(target - left @ right, own)
            sparse = part.exact_dense({**own, **kept})
            before = error
            error = float(np.linalg.norm(target - left @ right - sparse))
            if error > (1 - _GAIN) * before:
                break
        result = {SPARSE + name: array for name, array in kept.items()}
        factors = {"lr_weight1": right, "lr_weight2": left}
        return error, result | {LOW_RANK + name: array for name, array in factors.items()}

    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        """The two parts' gradients; a gate's is left out."""
        return {
            prefix + name: share * array
            for prefix, part, share, own in self._each(arrays)
            for name, array in part.pull_back(own, gradient).items()
        }

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """Alternate between what both parts' moments ask for, from zero: where both can be met this
        tends to the solution of least norm (von Neumann 1950)."""
        gradient = np.zeros((self.spec.out_features, self.spec.in_features))
        for _ in range(_MOMENT_ROUNDS):
            change = np.zeros_like(gradient)
            for prefix, part, share, own in self._each(arrays):
                found = part.pull_back(own, gradient)
                missing = {
                    name: moment[prefix + name].astype(np.float64) / share - array
                    for name, array in found.items()
                }
                step = part.first_moment(own, missing)
                gradient, change = gradient + step, change + step
            if np.linalg.norm(change) <= _MOMENT_CHANGE * np.linalg.norm(gradient):
                break
        return gradient

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """The geometric mean of both parts' estimates; a part's own value where that is certain."""
        result = np.ones((self.spec.out_features, self.spec.in_features))
        estimates = []
        for prefix, part, share, own in self._each(arrays):
            found = part.second_moment(own, _inside(prefix, moment))
            estimates.append(found / share**2)
            result *= np.sqrt(estimates[-1])
        certain = self._parts[SPARSE].certain(_inside(SPARSE, arrays))
        return np.where(certain, estimates[0], result)

    def _each(self, arrays: Arrays) -> Iterator[tuple[str, Structure, float, Arrays]]:
        """Both parts: prefix, part, share, and its own arrays."""
        for (prefix, part), share in zip(self._parts.items(), self._shares(arrays), strict=True):
            yield prefix, part, share, _inside(prefix, arrays)

    def _shares(self, arrays: Arrays) -> tuple[float, float]:
        """1 - g and g; UserError where they depend on the input."""
        if not self.spec.gated:
            return 0.5, 0.5
        if np.any(arrays["gate.weight"]):
            raise UserError(
                "a SparseLR layer with a gate has no dense weight: how it mixes its two parts "
                "depends on the input; keep it as it is, or train it with gating: false"
            )
        share = float(1 / (1 + np.exp(-arrays["gate.bias"].astype(np.float64).item())))
        return 1 - share, share


def _inside(prefix: str, arrays: Arrays) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


_STRUCTURES: dict[str, type[Structure]] = {
    "monarch": _Product,
    "low_rank": _LowRank,
    "blockdiag": _Blockdiag,
    "block_sparse": _BlockSparse,
    "masked": _Masked,
    "dense": _Dense,
    "factors": _Factors,
}
_BLENDED = "sparse_low_rank"
_KINDS: dict[type, str] = {
    MonarchLinear: "monarch",
    BlockdiagLinear: "blockdiag",
    LowRank: "low_rank",
    BlockSparseLinear: "block_sparse",
    MaskedLinear: "masked",
    SparseLRLinear: _BLENDED,
    ButterflyLinear: "factors",
}


# The array of a layer that tells its kind, the kind, the array beside it, and the axes of the two.
_PARTNERS = {
    "blkdiag1": ("monarch", "blkdiag2", (3, 3)),
    "lr_weight1": ("low_rank", "lr_weight2", (2, 2)),
    "weight": ("block_sparse", "layout", (3, 2)),
}


def structure_of(spec: LayerSpec) -> Structure:
    """The structure of a layer; UserError where its kind is unknown."""
    if spec.kind == _BLENDED and spec.sparse is not None:
        low_rank = _LowRank(LayerSpec("low_rank", spec.in_features, spec.out_features))
        return Blended(spec, structure_of(spec.sparse), low_rank)
    if spec.kind not in _STRUCTURES:
        known = ", ".join([*_STRUCTURES, _BLENDED])
        raise UserError(f"unknown kind of layer {spec.kind!r}; known: {known}")
    return _STRUCTURES[spec.kind](spec)


def _shape3(factor: np.ndarray) -> Shape3:
    first, second, third = factor.shape
    return first, second, third


def spec_of_module(module: nn.Module) -> LayerSpec | None:
    """What a layer is; None where it is not a structured layer known here."""
    kind = next((kind for cls, kind in _KINDS.items() if isinstance(module, cls)), None)
    if kind is None:
        return None
    nblocks, shuffle = getattr(module, "nblocks", 0), getattr(module, "shuffle", False)
    spec = LayerSpec(kind, module.in_features, module.out_features, nblocks, shuffle)
    if isinstance(module, MaskedLinear):
        pattern = json.dumps(module.sparsity_config.to_dict(), sort_keys=True)
        return replace(spec, pattern=pattern)
    if isinstance(module, ButterflyLinear):
        config = {name: getattr(module, name) for name in module.options}
        return replace(spec, pattern=json.dumps({TARGET: type(module).__name__, **config}))
    if isinstance(module, SparseLRLinear):
        dense = type(module.sparse) is nn.Linear
        sparse = replace(spec, kind="dense") if dense else spec_of_module(module.sparse)
        return replace(spec, sparse=sparse, gated=module.gate is not None)
    return spec


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
    implies, or is of butterfly factors.
    """
    found: dict[str, LayerSpec] = {}
    for name, array in state.items():
        prefix, _, last = name.rpartition(".")
        if last == "factors" and array.ndim == 6:
            raise UserError(f"no array tells the widths of {prefix}: densify_model makes it dense")
        if last not in _PARTNERS:
            continue
        kind, partner, axes = _PARTNERS[last]
        other, blocks = state.get(joined(prefix, partner)), 0
        if other is not None and (array.ndim, other.ndim) != axes:
            raise UserError(
                f"{prefix}: {last} {array.shape} and {partner} {other.shape} are to have "
                f"{axes[0]} and {axes[1]} axes"
            )
        if other is None and (last != "weight" or array.ndim != 3):
            continue
        if other is None:
            kind, blocks = "blockdiag", array.shape[0]
            size = blocks * array.shape[2], blocks * array.shape[1]
        elif kind == "monarch":
            blocks = array.shape[0]
            size = blocks * array.shape[2], other.shape[0] * other.shape[1]
        elif kind == "low_rank":
            size = array.shape[1], other.shape[0]
        else:
            size = other.shape[1] * array.shape[2], other.shape[0] * array.shape[1]
        bias = state.get(joined(prefix, "bias"))
        rows = size[1] if bias is None else len(bias)
        found[prefix] = LayerSpec(kind, size[0], rows, nblocks=blocks)
    _combine_parts(state, found)
    return found


def _combine_parts(state: Arrays, found: dict[str, LayerSpec]) -> None:
    for prefix in [name for name in found if f".{name}.".endswith(f".{LOW_RANK}")]:
        outer = prefix.removesuffix(LOW_RANK[:-1]).removesuffix(".")
        # The low-rank part is never padded, so it knows the sizes.
        size = found[prefix].in_features, found[prefix].out_features
        sparse_name = joined(outer, SPARSE[:-1])
        if sparse_name in found:
            part = found.pop(sparse_name)
            sparse = replace(part, in_features=size[0], out_features=size[1])
        elif joined(sparse_name, "weight") in state:
            sparse = LayerSpec("dense", *size)
        else:
            continue
        del found[prefix]
        gated = joined(outer, f"{GATE}weight") in state
        found[outer] = LayerSpec("sparse_low_rank", *size, sparse=sparse, gated=gated)


def layers_to_json(layers: Mapping[str, LayerSpec]) -> str:
    """The layers as JSON, to keep beside weights."""
    return json.dumps({name: asdict(spec) for name, spec in layers.items()})


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
