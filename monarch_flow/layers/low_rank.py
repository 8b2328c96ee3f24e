"""LowRank: a linear layer whose matrix is the product of a tall and a wide one."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from monarch_flow.layers.config import register_linear
from monarch_flow.layers.structured import (
    InitFunction,
    StructuredLinear,
    drawn_dense,
    fill,
    new_parameter,
    uniform,
)
from monarch_flow.layers.targets import check_positive

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
