"""A structured layer and a low-rank one side by side: SparseLRLinear ("Pixelfly")."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers.low_rank import low_rank_factors
from monarch_flow.projection.structure import Arrays, LayerSpec, Structure

SPARSE, LOW_RANK, GATE = "sparse.", "low_rank.", "gate."
# The alternating projections end after so many rounds, or one that changes less than this share.
# The first pair is for weights, whose last digits do not matter.
_ROUNDS = 30
_GAIN = 1e-3
_MOMENT_ROUNDS = 300
_MOMENT_CHANGE = 1e-7


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
        dense = sum(
            share * part.exact_dense(_inside(prefix, arrays))
            for (prefix, part), share in zip(self._parts.items(), self._shares(arrays), strict=True)
        )
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
            for (prefix, part), share in zip(self._parts.items(), self._shares(arrays), strict=True)
            for name, array in part.pull_back(_inside(prefix, arrays), gradient).items()
        }

    def first_moment(self, arrays: Arrays, moment: Arrays) -> np.ndarray:
        """Alternate between what both parts' moments ask for, from zero: where both can be met this
        tends to the solution of least norm (von Neumann 1950)."""
        shares = self._shares(arrays)
        gradient = np.zeros((self.spec.out_features, self.spec.in_features))
        for _ in range(_MOMENT_ROUNDS):
            change = np.zeros_like(gradient)
            for (prefix, part), share in zip(self._parts.items(), shares, strict=True):
                own = _inside(prefix, arrays)
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
        for (prefix, part), share in zip(self._parts.items(), self._shares(arrays), strict=True):
            found = part.second_moment(_inside(prefix, arrays), _inside(prefix, moment))
            estimates.append(found / share**2)
            result *= np.sqrt(estimates[-1])
        certain = self._parts[SPARSE].certain(_inside(SPARSE, arrays))
        return np.where(certain, estimates[0], result)

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
