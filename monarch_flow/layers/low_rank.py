"""LowRank, the product of a tall and a wide matrix, and a structured layer beside one."""

from __future__ import annotations

from typing import Any, ClassVar

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.utils.checkpoint import checkpoint

from monarch_flow.layers.config import LinearConfig, LinearLike, check_positive, register_linear
from monarch_flow.layers.structured import (
    InitFunction,
    OptionReaders,
    StructuredLinear,
    drawn_dense,
    fill,
    new_parameter,
    uniform,
)

INITS = ("linear", "svd")


def low_rank_factors(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the nearest matrix of a rank, in the Frobenius norm (Eckart and Young 1936).

    With the matrix (m, n) = U S V^T they are U sqrt(S) and sqrt(S) V^T, float64, cut to (m, rank)
    and (rank, n), with zeros beyond min(m, n). They come from the eigenvectors of the smaller Gram
    matrix, which is much faster than a full decomposition but loses singular values below 1e-8 of
    the largest.
    """
    matrix = np.asarray(matrix, dtype=np.float64)
    if matrix.shape[0] < matrix.shape[1]:
        right, left = low_rank_factors(matrix.T, rank)
        return left.T, right.T
    squares, vectors = np.linalg.eigh(matrix.T @ matrix)
    kept = min(rank, matrix.shape[1])
    # eigh sorts upwards.
    squares, vectors = squares[::-1][:kept], vectors[:, ::-1][:, :kept]
    values = np.sqrt(np.maximum(squares, 0.0))
    floor = 1e-8 * (values[0] if values.size and values[0] > 0 else 1.0)
    root = np.where(values > floor, np.sqrt(values), 0.0)
    scale = np.divide(1.0, root, out=np.zeros_like(root), where=root > 0)
    left = np.zeros((matrix.shape[0], rank))
    right = np.zeros((rank, matrix.shape[1]))
    left[:, :kept] = (matrix @ vectors) * scale
    right[:kept] = root[:, None] * vectors.T
    return left, right


@register_linear("low_rank", rank=0.1)
class LowRank(StructuredLinear):
    """y = x W1^T W2^T + bias, with `lr_weight1` (R, n) and `lr_weight2` (m, R).

    Args:
        rank: R; a float is a share of min(n, m), rounded down.
        bias: whether it has a bias; it starts as U(-1/sqrt(n), 1/sqrt(n)).
        init: "linear" draws both factors as nn.Linear draws its weight; "svd" divides the best
            approximation of a matrix that is drawn so (spectral initialisation, Khodak et al.
            2021).

    Raises:
        UserError: the rank is below 1, or `init` is neither.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: float,
        bias: bool = True,
        init: str = "linear",
        weight_decay: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if isinstance(rank, float):
            what = f"the rank {rank} of a LowRank {in_features} -> {out_features}, as a number,"
            rank = int(rank * min(in_features, out_features))
        else:
            what = "the rank of a LowRank"
        self.rank = check_positive(what, rank)
        if init not in INITS:
            raise UserError(f"init '{init}' of LowRank is neither of {', '.join(INITS)}")
        self.init = init
        self.no_weight_decay = () if weight_decay else ("lr_weight1", "lr_weight2")
        self.lr_weight1 = new_parameter((self.rank, in_features), device, dtype)
        self.lr_weight2 = new_parameter((out_features, self.rank), device, dtype)
        self.reset_parameters()

    def macs_per_row(self) -> int:
        return self.rank * (self.in_features + self.out_features)

    def bias_fan(self) -> int:
        return self.in_features

    def reset_parameters(self) -> None:
        if self.init == "svd":
            super().reset_parameters()
            return
        uniform(self.lr_weight1, self.in_features)
        uniform(self.lr_weight2, self.rank)
        self.reset_bias()

    def draw_from(self, init_function: InitFunction) -> None:
        """The best approximation of a matrix (m, n) that `init_function` fills."""
        dense = drawn_dense(self.out_features, self.in_features, init_function)
        left, right = low_rank_factors(dense, self.rank)
        fill(self.lr_weight1, right)
        fill(self.lr_weight2, left)

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        inner = flow._C.matmul(x, self.lr_weight1, transpose_b=True)
        return flow._C.matmul(inner, self.lr_weight2, transpose_b=True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


@register_linear("pixelfly", sparse_cfg="fbbfly", rank=32)
class SparseLRLinear(StructuredLinear):
    """y = (1 - g) sparse(x) + g low_rank(x) + bias, after Chen et al. 2021 ("Pixelated Butterfly"),
    section 3.3, with g = sigmoid(gate(x)), one number for each row of x, or g = 1/2.

    The bias starts as U(-1/sqrt(m), 1/sqrt(m)); the parts have none of their own, except the gate.

    Args:
        sparse_cfg: the other part, any layer that `LinearConfig.of` reads.
        rank: of the low-rank part; a float is a share of min(n, m).
        gating: whether g depends on x. Without it the layer is linear.
        checkpointing: compute activations again for the gradient (eagerly; under nn.Graph use the
            graph's own `activation_checkpointing`).

    Raises:
        UserError: a config is wrong.
    """

    option_readers: ClassVar[OptionReaders] = {"sparse_cfg": LinearConfig.of}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sparse_cfg: LinearLike,
        bias: bool = True,
        rank: float = 0.1,
        gating: bool = True,
        checkpointing: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        place = {"device": device, "dtype": dtype}
        config = LinearConfig.of(sparse_cfg)
        self.sparse = config.build(in_features, out_features, bias=False, **place)
        self.low_rank = LowRank(in_features, out_features, rank, bias=False, **place)
        self.gate: nn.Module | None = nn.Linear(in_features, 1, **place) if gating else None
        self.checkpointing = checkpointing
        self.reset_bias()

    def macs_per_row(self) -> int:
        sparse = self.in_features * self.out_features
        if isinstance(self.sparse, StructuredLinear):
            sparse = self.sparse.macs_per_row()
        gate = 0 if self.gate is None else self.in_features
        return sparse + self.low_rank.macs_per_row() + gate

    @property
    def saving(self) -> float:
        """The sum of both parts'; the gate is not counted."""
        gate = 0 if self.gate is None else self.in_features
        return (self.macs_per_row() - gate) / (self.in_features * self.out_features)

    def reset_parameters(self) -> None:
        for part in (self.sparse, self.low_rank, self.gate):
            if part is not None:
                part.reset_parameters()
        self.reset_bias()

    def reset_dense_init(
        self, init_function: InitFunction, bias_init_function: InitFunction | None = None
    ) -> None:
        """Draw the bias only: `apply` calls the parts and the gate on their own."""
        self.reset_bias_with(bias_init_function)

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        if self.checkpointing and not x.is_lazy and flow.is_grad_enabled():
            return checkpoint(self._blend, x)
        return self._blend(x)

    def _blend(self, x: flow.Tensor) -> flow.Tensor:
        sparse, low_rank = self.sparse(x), self.low_rank(x)
        if self.gate is None:
            return 0.5 * (sparse + low_rank)
        return sparse + flow.sigmoid(self.gate(x)) * (low_rank - sparse)

    def dense(self) -> flow.Tensor:
        """The matrix; UserError where there is a gate, as the layer is not linear then."""
        if self.gate is not None:
            raise UserError(
                "a SparseLRLinear with gating weighs its parts by the input, so no matrix does the "
                "same: build it with gating: false, or densify sparse and low_rank apart"
            )
        sparse = self.sparse
        matrix = sparse.dense() if isinstance(sparse, StructuredLinear) else sparse.weight
        return 0.5 * (matrix + self.low_rank.dense())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, checkpointing={self.checkpointing}"
