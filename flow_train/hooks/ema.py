"""Exponential moving average of the weights, which validation and test use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.hooks.base import Hook
from flow_train.optim import ExponentialMovingAverage
from flow_train.optim.ema import PREFIX, averages_in
from flow_train.steps.data_parallel import broadcast_buffers

if TYPE_CHECKING:
    from flow_train.loop import Trainer


class MovingAverage(Hook):
    """Averages the weights after every optimizer step, the one of an epoch's last batches included;
    options are those of `ExponentialMovingAverage`."""

    def __init__(self, decay: float, use_num_updates: bool = False) -> None:
        self._decay = decay
        self._use_num_updates = use_num_updates
        self.average: ExponentialMovingAverage | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self.average = ExponentialMovingAverage(trainer.model, self._decay, self._use_num_updates)

    def on_step_end(self, trainer: Trainer) -> None:
        assert self.average is not None
        self.average.update(trainer.model)

    def evaluation_weights(
        self, trainer: Trainer, model: nn.Module
    ) -> AbstractContextManager[None]:
        if self.average is None:
            return nullcontext()
        if model is trainer.model:
            return _swapped_in(self.average, model)
        # A copy that is made for each evaluation, of a model of global tensors.
        averages = self.average.state_arrays()
        with flow.no_grad():
            for name, value in model.state_dict().items():
                if PREFIX + name in averages:
                    value.copy_(flow.tensor(averages[PREFIX + name]).to(value.device))
        broadcast_buffers(model)
        return nullcontext()

    def on_model_replaced(self, trainer: Trainer, arrays: Mapping[str, np.ndarray]) -> None:
        if self.average is not None:
            self.average.replace(trainer.model, averages_in(arrays))

    def state(self) -> dict[str, Any]:
        return {} if self.average is None else self.average.state()

    def arrays(self) -> dict[str, np.ndarray]:
        return {} if self.average is None else self.average.state_arrays()

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        if self.average is not None:
            self.average.load(arrays, state)


@contextmanager
def _swapped_in(average: ExponentialMovingAverage, model: nn.Module) -> Iterator[None]:
    with average.swapped_in(model):
        # Each process has averaged running statistics of its own batches.
        broadcast_buffers(model)
        yield
