"""Exponential moving average of a model's parameters, to validate and to keep in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
from oneflow import nn

# The prefix of the arrays' names in a checkpoint.
PREFIX = "ema/"
# The buffers of BatchNorm that are averaged; its count of batches has no part in what it computes.
_STATISTICS = ("running_mean", "running_var")


def averages_in(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The moving averages among the arrays of a checkpoint, by the names of the weights."""
    return {
        name.removeprefix(PREFIX): array
        for name, array in arrays.items()
        if name.startswith(PREFIX)
    }


class ExponentialMovingAverage:
    """Keeps `shadow += (1 - d) (parameter - shadow)` for each trainable parameter, in float32.

    d is `decay`, or min(decay, (1 + n) / (10 + n)) at the n-th update with `use_num_updates`, which
    forgets the start of training sooner. Call `update` after every update of the parameters, also
    after one for the few batches left over at an epoch's end.

    The running statistics of BatchNorm are averaged in the same way: the model's own belong to its
    last weights, and averaged weights can be far from those. Other buffers, and parameters that are
    not trained, are not averaged. `shadow` has tensors by name, global where the model's are;
    `num_updates` counts over all runs of a training. ValueError if `decay` is out of range.
    """

    def __init__(self, model: nn.Module, decay: float, use_num_updates: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"the decay of the moving average is {decay}, not from 0 to 1")
        self.decay = decay
        self.use_num_updates = use_num_updates
        self.num_updates = 0
        self.shadow: dict[str, flow.Tensor] = {}
        self.reset(model)

    def reset(self, model: nn.Module) -> None:
        self.shadow = {
            name: _copy(value.detach().to(flow.float32)) for name, value in _averaged(model).items()
        }

    def current_decay(self) -> float:
        if not self.use_num_updates:
            return self.decay
        n = self.num_updates + 1
        return min(self.decay, (1 + n) / (10 + n))

    def update(self, model: nn.Module) -> None:
        """Take in the parameters after an update; KeyError if the model has others than at the
        start."""
        rate = 1 - self.current_decay()
        self.num_updates += 1
        with flow.no_grad():
            for name, value in self._matching(model).items():
                shadow = self.shadow[name]
                shadow.add_(value.detach().to(flow.float32) - shadow, alpha=rate)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` has the averages as its parameters; afterwards its own again."""
        own = {name: _copy(value.detach()) for name, value in self._matching(model).items()}
        try:
            self.copy_to(model)
            yield
        finally:
            _assign(model, own)

    def copy_to(self, model: nn.Module) -> None:
        """Give `model` the averages as its parameters for good, such as to save or convert it."""
        self._matching(model)
        _assign(model, self.shadow)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Averages by "ema/" and the parameter's name, float32. A collective call for global
        tensors."""
        return {
            PREFIX + name: distributed.local_value(value).numpy()
            for name, value in self.shadow.items()
        }

    def state(self) -> dict[str, Any]:
        return {
            "decay": self.decay,
            "use_num_updates": self.use_num_updates,
            "num_updates": self.num_updates,
        }

    def load(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> None:
        """Go on from what `state_arrays` and `state` gave; `arrays` may hold more. The decay stays
        this object's own: it may be changed for the rest of a run. CheckpointError if an average is
        missing, or has another shape than its parameter."""
        loaded = {}
        for name, shadow in self.shadow.items():
            array = arrays.get(PREFIX + name)
            if array is None:
                raise CheckpointError(
                    f"the checkpoint has no moving average of {name}; switch callbacks.ema off, or "
                    "resume from a checkpoint of a run that had it on"
                )
            if array.shape != tuple(shadow.shape):
                raise CheckpointError(
                    f"the moving average of {name} has shape {array.shape} in the checkpoint, the "
                    f"parameter {tuple(shadow.shape)}"
                )
            loaded[name] = array
        for name, array in loaded.items():
            self.shadow[name] = _like(array, self.shadow[name])
        self.num_updates = int(state.get("num_updates", 0))

    def replace(self, model: nn.Module, averages: Mapping[str, np.ndarray]) -> None:
        """Average another model from now on, as after its structured layers became dense ones.
        `averages` has by name what the average goes on from, such as the dense form of the old
        averages; a parameter that is not there goes on with its old average if it has one of its
        shape, else starts from its own value."""
        old = self.shadow
        self.reset(model)
        for name, shadow in self.shadow.items():
            if name in averages:
                self.shadow[name] = _like(averages[name], shadow)
            elif name in old and old[name].shape == shadow.shape:
                self.shadow[name] = old[name]

    def _matching(self, model: nn.Module) -> dict[str, flow.Tensor]:
        values = _averaged(model)
        if values.keys() != self.shadow.keys():
            other = sorted(values.keys() ^ self.shadow.keys())
            raise KeyError(f"the model's parameters are not those averaged: {', '.join(other[:5])}")
        return values


def _averaged(model: nn.Module) -> dict[str, flow.Tensor]:
    """Trainable parameters and running statistics, by name; the model's own tensors."""
    values: dict[str, flow.Tensor] = {
        name: value for name, value in model.named_parameters() if value.requires_grad
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name in _STATISTICS:
                value = getattr(module, name)
                if value is not None:
                    values[f"{path}.{name}" if path else name] = value
    return values


def _copy(tensor: flow.Tensor) -> flow.Tensor:
    with flow.no_grad():
        return tensor.clone().detach()


def _assign(model: nn.Module, values: Mapping[str, flow.Tensor]) -> None:
    with flow.no_grad():
        for name, value in _averaged(model).items():
            value.copy_(values[name].to(value.dtype))


def _like(array: np.ndarray, tensor: flow.Tensor) -> flow.Tensor:
    """A float32 tensor of the array's values where `tensor` is, global if that is."""
    values = np.ascontiguousarray(array, dtype=np.float32)
    if tensor.is_global:
        local = flow.tensor(values)
        broadcast = [flow.sbp.broadcast] * len(tensor.sbp)
        return local.to_global(placement=tensor.placement, sbp=broadcast).to_global(sbp=tensor.sbp)
    return flow.tensor(values, device=tensor.device)
