"""Training steps of a model that is cut over the processes; see `flow_train.sharding`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import OwnPieces, ShardLayout
from flow_train.sharding import fully_shard
from flow_train.steps.eager import EagerStep
from flow_train.task import Task


class ShardedStep(EagerStep):
    """Eager steps of a model that is cut over the processes; see `fully_shard`, whose options
    `sharding` takes. A model that is cut already is trained as it is.

    The model's forward passes, in evaluations too, are collective calls: every process must make as
    many of them.
    """

    is_collective = True

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        make_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
        task: Task,
        *,
        sharding: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        self.sharding = fully_shard(model, **sharding)
        super().__init__(model, backend, make_optimizer(model), task, forward=model, **settings)
        if self._scaler is not None:
            # Processes would not agree on which steps to leave out.
            raise UserError("float16: a model in shards trains in float32 or bfloat16")
        self._frees_gradients = True

    def _clipped(self, parameters: Sequence[flow.Tensor]) -> flow.Tensor | None:
        if self.clip is not None:
            return self.sharding.clip(self.clip)
        return self.sharding.gradient_norm() if self.wants_norm else None

    def named_weights(self) -> Iterator[tuple[str, flow.Tensor]]:
        return self.sharding.named_weights()

    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        return self.sharding.named_gradients()

    @property
    def layout(self) -> ShardLayout:
        return self.sharding.layout

    def own(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return OwnPieces(arrays, self.layout)
