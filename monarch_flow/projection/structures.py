"""What each kind of structured layer's arrays mean: its dense weight, and the way back.

Layers are described by a `LayerSpec`, so that files and checkpoints can be converted where no
module exists; the arrays are those of the layer's state dict, by their name inside the layer.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers.sparsity import SparsityConfig
from monarch_flow.projection import moments
from monarch_flow.projection.elementwise import (
    block_sparse_to_dense,
    blockdiag_to_dense,
    project_to_block_sparse,
    project_to_blockdiag,
)
from monarch_flow.projection.low_rank import project_to_low_rank
from monarch_flow.projection.monarch import (
    Shape3,
    merge_pieces,
    monarch_to_dense,
    project_to_factors,
    slot_table,
    split_factors,
    split_pieces,
)

Arrays = Mapping[str, np.ndarray]

SPARSE, LOW_RANK, GATE = "sparse.", "low_rank.", "gate."
# Rounds of the alternating projection onto sparse plus low-rank matrices.
_ROUNDS = 6


@dataclass(frozen=True)
class LayerSpec:
    """A structured layer without its numbers.

    Attributes:
        kind: "monarch", "blockdiag", "low_rank", "block_sparse", "masked" or "sparse_low_rank"; for
            a part of the last one also "dense".
        in_features: n, without padding.
        out_features: m, without padding.
        nblocks: blocks of "monarch" and "blockdiag"; told by the arrays, so for information only.
        shuffle: of "blockdiag": whether the input is permuted first.
        sparse: of "sparse_low_rank": the layer beside the low-rank one.
        gated: of "sparse_low_rank": whether it has a gate.
        pattern: of "masked": its sparsity config as JSON, as no array tells the mask.
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
    """A kind of layer, for one layer.

    Attributes:
        names: the layer's arrays that the dense weight takes the place of.
        buffers: its other arrays, without the bias, that a dense layer has no use for.
    """

    names: tuple[str, ...]
    buffers: tuple[str, ...] = ()

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def dense(self, arrays: Arrays) -> np.ndarray:
        """The dense weight (m, n), in the arrays' dtype.

        Raises:
            UserError: the layer is no linear map.
        """

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
        """The arrays of `names` whose dense weight is nearest, in the dtype of `weight`.

        Args:
            weight: (m, n).
            arrays: of the layer as it was built, for shapes and buffers.
        """

    @abstractmethod
    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """Estimate of the averaged gradient (m, n) from those of the arrays, see `moments`."""

    @abstractmethod
    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """Estimate of the averaged squares (m, n) of the gradient from those of the arrays."""


class _Product(Structure):
    """Monarch: two factors, a product of low rank in each piece."""

    names = ("blkdiag1", "blkdiag2")

    def _factors(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        return arrays[self.names[0]], arrays[self.names[1]]

    def dense(self, arrays: Arrays) -> np.ndarray:
        size = self.spec.out_features, self.spec.in_features
        return monarch_to_dense(*self._factors(arrays), *size)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        shapes = (_shape3(factor) for factor in self._factors(arrays))
        return dict(zip(self.names, project_to_factors(weight, *shapes), strict=True))

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        pieces = moments.first_moment(
            *self._cropped_pieces(arrays), *split_factors(*self._factors(moment))
        )
        return self._merge(pieces)

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        pieces = moments.second_moment(
            *self._cropped_pieces(arrays), *split_factors(*self._factors(moment))
        )
        # A piece without a slot is zero whatever the factors are.
        shape1, shape2 = map(_shape3, self._factors(arrays))
        used = slot_table(shape1[0], shape1[1], shape2[0])[1].any(axis=-1)
        known = self._merge(np.broadcast_to(used[..., None, None], pieces.shape))
        return moments.complete(self._merge(pieces), known)

    def _cropped_pieces(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Factors of each piece with zeros where they meet padding: the gradient is zero there, so
        those numbers tell nothing about it."""
        factors = self._factors(arrays)
        left, right = split_factors(*factors)
        inside = split_pieces(
            np.ones((self.spec.out_features, self.spec.in_features)), *map(_shape3, factors)
        )
        return left * inside.max(axis=-1)[..., :, None], right * inside.max(axis=-2)[..., None, :]

    def _merge(self, pieces: np.ndarray) -> np.ndarray:
        return merge_pieces(pieces, self.spec.out_features, self.spec.in_features)


class _LowRank(_Product):
    """One piece that is the whole matrix."""

    names = ("lr_weight1", "lr_weight2")

    def _factors(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        return arrays[self.names[0]][None], arrays[self.names[1]][None]

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        factors = project_to_low_rank(weight, len(arrays[self.names[0]]))
        return dict(zip(self.names, factors, strict=True))


class _Entries(Structure):
    """Numbers that are entries of the dense weight."""

    names = ("weight",)

    @abstractmethod
    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        """The dense matrix with these numbers, zero elsewhere."""

    def dense(self, arrays: Arrays) -> np.ndarray:
        return self._put(arrays["weight"], arrays)

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        return self._put(moment["weight"].astype(np.float64), arrays)

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        known = self._put(np.ones(arrays["weight"].shape, bool), arrays)
        return moments.complete(self._put(moment["weight"].astype(np.float64), arrays), known)


class _Blockdiag(_Entries):
    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        spec = self.spec
        return blockdiag_to_dense(
            values, spec.out_features, spec.in_features, shuffle=spec.shuffle
        )

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        blocks = len(arrays["weight"])
        return {"weight": project_to_blockdiag(weight, blocks, shuffle=self.spec.shuffle)}


class _BlockSparse(_Entries):
    buffers = ("layout",)

    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        spec = self.spec
        return block_sparse_to_dense(
            values, arrays["layout"], spec.out_features, spec.in_features
        )

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        block = arrays["weight"].shape[-1]
        return {"weight": project_to_block_sparse(weight, arrays["layout"], block)}


class _Masked(_Entries):
    """A dense weight and a mask, which is in no checkpoint."""

    def _mask(self) -> np.ndarray:
        spec = self.spec
        pattern = SparsityConfig.of(json.loads(spec.pattern))
        side = pattern.block
        padded = (-(-width // side) * side for width in (spec.out_features, spec.in_features))
        mask = pattern.layout(*padded).repeat(side, axis=0).repeat(side, axis=1)
        return mask[: spec.out_features, : spec.in_features]

    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        return np.where(self._mask(), values, np.zeros((), values.dtype))

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        return {"weight": self._put(weight, arrays)}


class _Dense(_Entries):
    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        return values

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        return {"weight": weight.copy()}


class _SparseLowRank(Structure):
    """(1 - g) sparse + g low-rank, with g = 1/2, or g = sigmoid(gate(x)) where there is a gate."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        if spec.sparse is None:
            raise ValueError("a sparse_low_rank layer needs the spec of its sparse layer")
        self._sparse = structure_of(spec.sparse)
        self._low_rank = _LowRank(LayerSpec("low_rank", spec.in_features, spec.out_features))
        gate = ("gate.weight", "gate.bias") if spec.gated else ()
        self.names = (
            *(SPARSE + name for name in self._sparse.names),
            *(LOW_RANK + name for name in self._low_rank.names),
            *gate,
        )
        self.buffers = tuple(SPARSE + name for name in self._sparse.buffers)

    def _share(self, arrays: Arrays) -> float:
        """g, where it is the same for every input."""
        if not self.spec.gated:
            return 0.5
        if np.any(arrays["gate.weight"]):
            raise UserError(
                "a SparseLR layer with a gate has no dense weight: how it mixes its two parts "
                "depends on the input; keep it as it is, or train it with gating: false"
            )
        return float(1 / (1 + np.exp(-arrays["gate.bias"].astype(np.float64).item())))

    def dense(self, arrays: Arrays) -> np.ndarray:
        share = self._share(arrays)
        parts = (
            self._sparse.dense(_inside(SPARSE, arrays)),
            self._low_rank.dense(_inside(LOW_RANK, arrays)),
        )
        dense = (1 - share) * parts[0].astype(np.float64) + share * parts[1].astype(np.float64)
        return dense.astype(parts[0].dtype)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        """Alternates between the nearest sparse and the nearest low-rank matrix to what the other
        leaves: each round is no worse than the one before, but the end need not be the best of
        all. A gate is opened half-way for every input (its numbers become 0)."""
        sparse, low_rank = _inside(SPARSE, arrays), _inside(LOW_RANK, arrays)
        target = 2 * weight.astype(np.float64)
        rest = target
        for _ in range(_ROUNDS):
            kept = self._sparse.project(rest, sparse)
            factors = self._low_rank.project(
                target - self._sparse.dense({**sparse, **kept}), low_rank
            )
            rest = target - self._low_rank.dense(factors)
        kept = self._sparse.project(rest, sparse)
        result = {SPARSE + name: array for name, array in kept.items()}
        result |= {LOW_RANK + name: array for name, array in factors.items()}
        if self.spec.gated:
            result |= {
                name: np.zeros_like(arrays[name]) for name in ("gate.weight", "gate.bias")
            }
        return {name: array.astype(weight.dtype) for name, array in result.items()}

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        raise self._no_moments()

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        raise self._no_moments()

    def _no_moments(self) -> UserError:
        return UserError(
            "the optimizer's moments of a SparseLR layer cannot be carried over to a dense one: "
            "its two parts see overlapping shares of one gradient; start the optimizer afresh"
        )


_STRUCTURES: dict[str, type[Structure]] = {
    "monarch": _Product,
    "low_rank": _LowRank,
    "blockdiag": _Blockdiag,
    "block_sparse": _BlockSparse,
    "masked": _Masked,
    "dense": _Dense,
    "sparse_low_rank": _SparseLowRank,
}


def structure_of(spec: LayerSpec) -> Structure:
    """The structure of a layer.

    Raises:
        UserError: its kind is unknown.
    """
    if spec.kind not in _STRUCTURES:
        raise UserError(f"unknown kind of layer {spec.kind!r}; known: {', '.join(_STRUCTURES)}")
    return _STRUCTURES[spec.kind](spec)


def joined(prefix: str, name: str) -> str:
    """The name of a layer's array in the state dict of the whole; "" is the whole itself."""
    return f"{prefix}.{name}" if prefix else name


def _inside(prefix: str, arrays: Arrays) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _shape3(factor: np.ndarray) -> Shape3:
    first, second, third = factor.shape
    return first, second, third
