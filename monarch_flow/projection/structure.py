"""What a structured layer is without a module: a description, and what its arrays mean.

Layers are described by a `LayerSpec`, so that files and checkpoints can be converted where no
module exists; the arrays are those of the layer's state dict, by their name inside the layer.
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

    def certain(self, arrays: Arrays) -> np.ndarray:
        """Which entries of `second_moment` are no estimates, (m, n)."""
        return np.zeros((self.spec.out_features, self.spec.in_features), bool)

    @abstractmethod
    def pull_back(self, arrays: Arrays, gradient: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients of the arrays of `names`, in float64, for that of the dense weight (m, n)."""


def joined(prefix: str, name: str) -> str:
    """The name of a layer's array in the state dict of the whole; "" is the whole itself."""
    return f"{prefix}.{name}" if prefix else name
