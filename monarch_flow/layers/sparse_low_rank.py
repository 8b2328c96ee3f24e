"""A structured layer and a low-rank one side by side ("Pixelfly")."""

from __future__ import annotations

from typing import Any, ClassVar

from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn
from oneflow.utils.checkpoint import checkpoint

from monarch_flow.layers.config import LinearConfig, LinearLike, register_linear
from monarch_flow.layers.low_rank import LowRank
from monarch_flow.layers.structured import InitFunction, OptionReaders, StructuredLinear


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
