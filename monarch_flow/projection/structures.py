"""The kinds of structured layers: what their arrays mean, see `Structure`."""

from __future__ import annotations

import json
from abc import abstractmethod

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers.sparsity import SparsityConfig
from monarch_flow.projection import moments
from monarch_flow.projection.blended import Blended
from monarch_flow.projection.elementwise import (
    block_sparse_to_dense,
    blockdiag_to_dense,
    project_to_block_sparse,
    project_to_blockdiag,
)
from monarch_flow.projection.low_rank import project_to_low_rank
from monarch_flow.projection.monarch import (
    Shape3,
    merge_factors,
    merge_pieces,
    monarch_to_dense,
    project_to_factors,
    slot_table,
    split_factors,
    split_pieces,
)
from monarch_flow.projection.structure import Arrays, LayerSpec, Structure

__all__ = ["LayerSpec", "Structure", "structure_of"]


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
        pieces = moments.first_moment(
            *self._cropped_pieces(arrays), *split_factors(*self._factors(moment))
        )
        return self._merge(pieces)

    def second_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        pieces = moments.second_moment(
            *self._cropped_pieces(arrays), *split_factors(*self._factors(moment))
        )
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

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        return self._named(project_to_low_rank(weight, len(arrays[self.names[0]])))

    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[0] for name, array in super().pull_back(arrays, gradient).items()}


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
        second = self._put(moment["weight"].astype(np.float64), arrays)
        return moments.complete(second, self.certain(arrays))

    def certain(self, arrays: Arrays) -> np.ndarray:
        return self._put(np.ones(arrays["weight"].shape, bool), arrays)

    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        return self.project(gradient, arrays)


class _Blockdiag(_Entries):
    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        spec = self.spec
        return blockdiag_to_dense(values, spec.out_features, spec.in_features, shuffle=spec.shuffle)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        blocks = len(arrays["weight"])
        return {"weight": project_to_blockdiag(weight, blocks, shuffle=self.spec.shuffle)}


class _BlockSparse(_Entries):
    buffers = ("layout",)

    def _put(self, values: np.ndarray, arrays: Arrays) -> np.ndarray:
        spec = self.spec
        return block_sparse_to_dense(values, arrays["layout"], spec.out_features, spec.in_features)

    def project(self, weight: np.ndarray, arrays: Arrays) -> dict[str, np.ndarray]:
        block = arrays["weight"].shape[-1]
        return {"weight": project_to_block_sparse(weight, arrays["layout"], block)}


class _Masked(_Entries):
    """A dense weight and a mask, which is not in any checkpoint."""

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


_STRUCTURES: dict[str, type[Structure]] = {
    "monarch": _Product,
    "low_rank": _LowRank,
    "blockdiag": _Blockdiag,
    "block_sparse": _BlockSparse,
    "masked": _Masked,
    "dense": _Dense,
}
_BLENDED = "sparse_low_rank"


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
