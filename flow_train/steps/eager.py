"""One optimizer step, eagerly or under nn.Graph, on one process or many.

Both ways have one interface, and one form of their state on disk (`optimizer_state`): a run can be
resumed the other way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from oneflow_accel import agree, distributed, layouts, settings
from oneflow_accel import precision as precisions
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.optimizer_state import (
    by_parameter,
    eager_state,
    load_eager_state,
    state_keys,
)
from flow_train.checkpoint.shards import ShardLayout
from flow_train.rng import step_seed
from flow_train.task import Batch, Sum, Task, to


class StepFigures(NamedTuple):
    """What a step tells, as scalars on the device.

    Attributes:
        loss: mean over the step's samples.
        sums: of the task's figures.
        grad_norm: of all gradients together, before they are clipped; None where it is not known.
    """

    loss: flow.Tensor
    sums: dict[str, Sum]
    grad_norm: flow.Tensor | None = None


class TrainStep(ABC):
    """Runs training steps on a model that is on the backend's device.

    `optimizer` is over the model's parameters; `task` gives the loss. `clip` is the largest norm of
    all gradients together, None for no clipping, and `precision` one of
    `oneflow_accel.precision.PRECISIONS`. A batch of more than `part_size` samples goes through the
    model in parts of so many, whose gradients are accumulated; None: as it is. A step sets the
    optimizer's learning rate, one for all groups: ValueError where they differ. UserError says what
    the device cannot do.
    """

    # True where `step` returns figures of the whole batch on every process.
    returns_global_figures = False
    # True where a forward pass of the model needs all processes.
    is_collective = False
    # False where the optimizer has a schedule of its own, also for groups of different rates.
    takes_rates = True

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        optimizer: flow.optim.Optimizer,
        task: Task,
        *,
        clip: float | None = None,
        precision: str = "float32",
        part_size: int | None = None,
    ) -> None:
        if self.takes_rates and len({group["lr"] for group in optimizer.param_groups}) > 1:
            raise ValueError("parameter groups have learning rates of their own; a step sets one")
        self.model = model
        self.backend = backend
        # What a checkpoint could not hold is refused before anything is trained.
        state_keys(optimizer)
        self.optimizer = optimizer
        self.task = task
        self.part_size = part_size
        self.clip = clip
        self.precision = precision
        # Called before the parameters are updated; `named_gradients` answers meanwhile.
        self.before_update: Callable[[], None] | None = None
        # Whether the next step's gradient norm is worth a look at all gradients.
        self.wants_norm = False
        self._scaler: LossScaler | None = None
        feature = precisions.feature_of(precision)
        if feature is not None:
            require_feature(backend, feature, f"precision {precision}", "take float32")
        precisions.set_products(precision)
        if clip is not None:
            require_feature(backend, "gradient_clipping", "gradient clipping", "leave it out")

    @abstractmethod
    def step(self, batch: Batch, lr: float) -> StepFigures:
        """One update of the parameters by the mean gradient over a global batch, of which `batch`
        is this process's share."""

    def parts(self, batch: Batch) -> list[Batch]:
        """What goes through the model at once, in its order."""
        size = self.task.size(batch)
        length = self.part_size or size
        return [
            {name: array[start : start + length] for name, array in batch.items()}
            for start in range(0, size, length)
        ]

    @property
    def replicas(self) -> int:
        """How many processes have samples of their own."""
        return distributed.world_size()

    def seed(self, seed: int, step: int) -> int | None:
        """What the step's dropout masks are drawn with, so that a resumed run draws the same: of
        the run's seed, the number of steps done, and this process. None: go on as it is."""
        return step_seed(seed, step, distributed.rank())

    def named_weights(self) -> Iterator[tuple[str, flow.Tensor]]:
        """The parameters' values, whole and local however the model is laid out, one after the
        other; a step may change them. A collective call."""
        for name, parameter in self.model.named_parameters():
            yield name, agree.whole(parameter, to=None)

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        """The same of gradients, inside `before_update`, of the parameters that have one: of all
        images on all processes, not clipped yet."""

    @property
    def layout(self) -> ShardLayout | None:
        """How the model's parameters are cut over the processes; None where they are not."""
        return None

    def own(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Of a checkpoint's arrays, by KEY/NAME, what this process keeps, as its parameters are
        laid out."""
        return by_parameter(layouts.layout_array, arrays, self.model)

    @property
    def local_model(self) -> nn.Module:
        """A model of local tensors with the same layers; its parameters may be old ones."""
        return self.model

    @abstractmethod
    def evaluated_model(self) -> nn.Module:
        """The model with its present parameters, local to this process, in eval mode."""

    def arrays(self) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        """What a checkpoint keeps: the model's tensors, and the optimizer's by KEY/NAME, in the
        standard layout; of a model that is cut, this process's pieces. A process that writes
        nothing may get nothing. A collective call."""
        if self.layout is not None:
            # Each process writes what is not cut, and goes on with process 0's.
            broadcast_buffers(self.model)
        # A process that writes nothing copies nothing, unless the others need it for that.
        is_global = any(value.is_global for value in self.model.parameters())
        if not (distributed.is_main() or self.layout is not None or is_global):
            return {}, {}
        tensors = layouts.standard_state_dict(self.model)
        optimizer = self.optimizer_arrays()
        if self.layout is None:
            optimizer = by_parameter(layouts.standard_array, optimizer, self.model)
        return {name: value.numpy() for name, value in tensors.items()}, optimizer

    @abstractmethod
    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        """The optimizer's state by KEY/NAME. A collective call where parameters are global."""

    @abstractmethod
    def load_optimizer(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Set the optimizer's state and the number of steps done. `arrays` may hold more than
        `optimizer_arrays` gave; none leave the moments at zero. CheckpointError if an array is
        missing or of another shape; RuntimeError after the first step of a graph."""

    def close(self) -> None:  # noqa: B027
        """Free what it trains with; another one goes on. A collective call."""

    def state(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"loss_scale": self._scaler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._scaler is not None and "loss_scale" in state:
            self._scaler.load_state(state["loss_scale"])


class EagerStep(TrainStep):
    """Eager execution; DistributedDataParallel where there are several processes, whose gradients
    are added up in `reduce_dtype`: "float32" or "bfloat16". UserError where the device cannot.
    `forward`: what to call in its place, where gradients are added up otherwise."""

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        optimizer: flow.optim.Optimizer,
        task: Task,
        *,
        reduce_dtype: str = "float32",
        forward: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, backend, optimizer, task, **settings)
        if reduce_dtype != "float32":
            _require_sums(backend, reduce_dtype)
        self._forward = data_parallel(model, reduce_dtype) if forward is None else forward
        # DistributedDataParallel needs them: without, it would train by wrong ones.
        self._frees_gradients = False
        if self.precision == "float16":
            self._scaler = LossScaler()

    def step(self, batch: Batch, lr: float) -> StepFigures:
        if self.takes_rates:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        # The mean over the whole batch, however it is cut: a part's loss counts by its share of the
        # images or tokens that the task takes the mean over, and gradients add up.
        units = self.task.units(batch)
        each = (self._backward(part, self.task.units(part) / units) for part in self.parts(batch))
        return reduce(_added, each)._replace(grad_norm=self._update())

    def _backward(self, part: Batch, share: float) -> StepFigures:
        with precisions.autocast(self.backend, self.precision):
            loss, sums = self.task.loss(self._forward, self._inputs(part))
        if share != 1:
            loss = loss * share
        (loss if self._scaler is None else loss * self._scaler.scale).backward()
        return StepFigures(loss.detach(), sums)

    def _inputs(self, part: Batch) -> Mapping[str, flow.Tensor]:
        return to(self.backend.device(), part)

    def _update(self) -> flow.Tensor | None:
        """Update the parameters; returns the norm of the gradients."""
        parameters = [value for value in self.model.parameters() if value.requires_grad]
        # float16 only: a step whose gradients ran over is left out, on all processes alike.
        finite = self._scaler is None or self._scaler.unscale(parameters)
        norm = None
        if finite:
            # Hooks see gradients as they are summed, before clipping changes them.
            if self.before_update is not None:
                self.before_update()
            norm = self._clipped(parameters)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self._frees_gradients)
        return norm

    def _clipped(self, parameters: Sequence[flow.Tensor]) -> flow.Tensor | None:
        """Clip the gradients; the norm of all before, where somebody wants it."""
        if self.clip is not None:
            return nn.utils.clip_grad_norm_(parameters, self.clip)
        return _norm(parameters) if self.wants_norm else None

    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                yield name, agree.whole(parameter.grad, to=None)

    def evaluated_model(self) -> nn.Module:
        broadcast_buffers(self.model)
        return self.model.eval()

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        return eager_state(self.model, self.optimizer)

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        load_eager_state(self.model, self.optimizer, arrays, step)


def _added(one: StepFigures, other: StepFigures) -> StepFigures:
    sums = {
        name: Sum(each.total + other.sums[name].total, each.count + other.sums[name].count)
        for name, each in one.sums.items()
    }
    return StepFigures(one.loss + other.loss, sums)


def _norm(parameters: Sequence[flow.Tensor]) -> flow.Tensor | None:
    """The norm of all gradients, as if they were one vector."""
    norms = [flow.linalg.vector_norm(p.grad.detach()) for p in parameters if p.grad is not None]
    return flow.linalg.vector_norm(flow.stack(norms)) if norms else None


def require_feature(backend: Backend, feature: str, what: str, instead: str) -> None:
    """Refuse a setting if the device lacks its `feature` (one of
    `oneflow_accel.backends.base.FEATURES`). The UserError says `what` was asked for, the reason,
    and what to do `instead`, in words that hold for every command and for a program."""
    support = backend.supports(feature)
    if not support:
        raise UserError(f"{what}: {backend.name} cannot do this ({support.reason}); {instead}")


class _DataParallelShell(nn.Module):
    """What DistributedDataParallel hooks into, so that the model inside can also be called without
    collectives: processes evaluate different numbers of batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


def data_parallel(model: nn.Module, reduce_dtype: str = "float32") -> nn.Module:
    """What to call in training: `model` itself, or where there are several processes a module whose
    backward pass leaves the mean of all processes' gradients in the model's parameters, float32,
    sent and added up in `reduce_dtype`. Parameters and buffers become those of process 0. A model
    can be wrapped once only: its parameters keep the hooks."""
    if distributed.world_size() == 1:
        return model
    settings = {} if reduce_dtype == "float32" else {"reduce_dtype": getattr(flow, reduce_dtype)}
    return flow.nn.parallel.DistributedDataParallel(_DataParallelShell(model), **settings)


def _require_sums(backend: Backend, dtype: str) -> None:
    """A device's own sums may know no bfloat16, and end the process, as OneFlow's on CPUs."""
    support = backend.supports("bfloat16_collectives")
    in_one_memory = settings.SHARED_MEMORY.get() != "off" and plugin.state().loaded
    here = distributed.world_size() == distributed.local_world_size()
    if not support and not (here and in_one_memory):
        raise UserError(
            f"reduce_dtype {dtype}: {backend.name} cannot do this ({support.reason}) but in memory "
            "that the processes share: on one machine, with the CPU plug-in, without "
            f"{settings.SHARED_MEMORY.name}=off"
        )


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process the buffers of process 0. Running statistics are each process's own until
    the next forward pass; evaluation uses the ones that the checkpoint stores, process 0's."""
    distributed.broadcast(model.buffers())


class LossScaler:
    """Multiplies the loss so that small gradients do not become 0 in float16 (Micikevicius et al.
    2018, "Mixed precision training", section 3.2); oneflow 0.9.0 has it under nn.Graph only. Where
    a gradient is not finite the step is left out and the scale halved; after `growth_interval` good
    steps in a row it is doubled."""

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self._good_steps = 0

    def unscale(self, parameters: Iterable[flow.Tensor]) -> bool:
        """Divide the gradients by the scale; False where one is not finite, and the step must be
        left out. Waits for the device."""
        gradients = [value.grad for value in parameters if value.grad is not None]
        with flow.no_grad():
            for gradient in gradients:
                gradient.mul_(1.0 / self.scale)
            norms = flow.stack([gradient.norm() for gradient in gradients])
        # The gradients are the same on all processes, so all of them decide the same.
        finite = math.isfinite(float(norms.sum().numpy()))
        self._adapt(finite)
        return finite

    def _adapt(self, finite: bool) -> None:
        if not finite:
            self.scale /= 2
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale *= 2
            self._good_steps = 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
