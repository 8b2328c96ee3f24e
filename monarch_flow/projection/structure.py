"""What a structured layer is without a module: a description, and what its arrays mean.

A `LayerSpec` describes a layer, so that files and checkpoints can be converted where no module
exists; the arrays are those of its state dict, by their name inside the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LayerSpec:
    """A structured layer without its numbers.

    Attributes:
        kind: "monarch", "blockdiag", "low_rank", "block_sparse", "masked" or "sparse_low_rank"; for
            a part of the last one also "dense".
        in_features, out_features: n and m, without padding.
        nblocks: of "monarch" and "blockdiag"; for information only, as the arrays tell it.
        shuffle: of "blockdiag": whether the input is permuted first.
        sparse, gated: of "sparse_low_rank": the layer beside the low-rank one, and whether it has a
            gate.
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
