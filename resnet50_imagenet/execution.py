"""One training step, eagerly or under nn.Graph, on one process or many.

Both ways have one interface, and one form of their state on disk: parameters, buffers and momentum
under the model's own names in NCHW / OIHW. A run can be resumed the other way.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

from oneflow_accel import distributed, layouts
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.optim.step_decay import DECAY_EVERY, DECAY_FACTOR, step_decay
from flow_train.steps.data_parallel import broadcast_buffers, data_parallel
from flow_train.validation import class_scores, count_correct

MOMENTUM_PREFIX = "momentum/"


class TrainStep(ABC):
    """Runs training steps on a model.

    Args:
        model: on the backend's device, in the layout to train in.
        lr: the initial learning rate.
        steps_per_epoch: what turns epochs of the schedule into steps.
        freeze_bn: batch normalization keeps its running statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        steps_per_epoch: int,
        freeze_bn: bool,
    ) -> None:
        self.model = model
        self.backend = backend
        self.lr = lr
        self.steps_per_epoch = steps_per_epoch
        self.freeze_bn = freeze_bn
        self.optimizer = flow.optim.SGD(
            model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
        )

    @abstractmethod
    def step(self, images: np.ndarray, labels: np.ndarray, epoch: int) -> tuple[flow.Tensor, ...]:
        """One update of the parameters.

        Args:
            images: this process's share, float32, in the model's layout.
            labels: int64, (N,).
            epoch: which epoch it is, for the learning rate.

        Returns:
            Loss (mean over the batch), correct@1 and correct@5 (counts), scalars on the device: of
            this process's share when eager, of the whole batch under nn.Graph.
        """

    @abstractmethod
    def local_model(self) -> nn.Module:
        """The model with its present parameters, local to this process, in eval mode."""

    @abstractmethod
    def momentum_state(self) -> dict[str, flow.Tensor]:
        """Momentum of each parameter by the parameter's name; empty before the first step."""

    @abstractmethod
    def load_momentum(self, momentum: dict[str, np.ndarray], step: int) -> None:
        """Set the momentum, in the model's layout, and the number of steps done.

        Raises:
            RuntimeError: called after the first step of a graph.
        """

    # True where step() returns figures of the whole batch on every process.
    returns_global_figures = False

    def learning_rate(self, epoch: int) -> float:
        return step_decay(self.lr, epoch)

    def set_training_mode(self) -> None:
        self.model.train()
        if self.freeze_bn:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def state_for_checkpoint(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Model and optimizer arrays in the standard layout, by name. A collective call where
        parameters are global tensors."""
        model = {
            name: value.numpy() for name, value in layouts.standard_state_dict(self.model).items()
        }
        momentum = {}
        for name, value in self.momentum_state().items():
            array = distributed.local_value(value).numpy()
            momentum[MOMENTUM_PREFIX + name] = layouts.standard_array(name, array, self.model)
        return model, momentum

    def load_optimizer_arrays(self, arrays: dict[str, np.ndarray], step: int) -> None:
        """Restore what `state_for_checkpoint` gave as its second part.

        Raises:
            CheckpointError: a parameter has no momentum there, or an array is of another shape.
        """
        momentum = {}
        if arrays:
            for name, parameter in self.model.named_parameters():
                array = arrays.get(MOMENTUM_PREFIX + name)
                if array is None:
                    raise CheckpointError(f"the checkpoint has no momentum for {name}")
                array = layouts.layout_array(name, array, self.model)
                if array.shape != tuple(parameter.shape):
                    raise CheckpointError(
                        f"momentum of {name} has shape {array.shape}, "
                        f"the parameter {tuple(parameter.shape)}"
                    )
                momentum[name] = array
        self.load_momentum(momentum, step)


class EagerStep(TrainStep):
    """Eager execution; DistributedDataParallel where there are several processes."""

    def __init__(self, model: nn.Module, backend: Backend, **settings) -> None:
        super().__init__(model, backend, **settings)
        self._forward = data_parallel(model)
        self._criterion = nn.CrossEntropyLoss()

    def step(self, images: np.ndarray, labels: np.ndarray, epoch: int) -> tuple[flow.Tensor, ...]:
        device = self.backend.device()
        targets = flow.tensor(labels, device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(epoch)
        scores = class_scores(self._forward(flow.tensor(images, device=device)))
        loss = self._criterion(scores, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with flow.no_grad():
            top1, top5 = count_correct(scores, targets)
        return loss.detach(), top1, top5

    def local_model(self) -> nn.Module:
        broadcast_buffers(self.model)
        return self.model.eval()

    def momentum_state(self) -> dict[str, flow.Tensor]:
        state = self.optimizer.state_dict()["state"]
        names = [name for name, _ in self.model.named_parameters()]
        return {
            name: state[index]["momentum_buf"]
            for index, name in enumerate(names)
            if "momentum_buf" in state.get(index, {})
        }

    def load_momentum(self, momentum: dict[str, np.ndarray], step: int) -> None:
        state = self.optimizer.state_dict()
        state["state"]["step"] = step
        for index, (name, _) in enumerate(self.model.named_parameters()):
            if name in momentum:
                state["state"][index] = {
                    "momentum_buf": flow.tensor(momentum[name], device=self.backend.device())
                }
        self.optimizer.load_state_dict(state)


class _TrainGraph(nn.Graph):
    def __init__(self, model: nn.Module, optimizer, scheduler, amp: bool, replicated) -> None:
        super().__init__()
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self._replicated = replicated
        self.add_optimizer(optimizer, lr_sch=scheduler)
        if amp:
            self.config.enable_amp(True)
            self.set_grad_scaler(flow.amp.GradScaler())

    def build(self, images: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, ...]:
        scores = class_scores(self.model(images))
        loss = self.criterion(scores, labels)
        loss.backward()
        top1, top5 = count_correct(scores, labels)
        if self._replicated is None:
            return loss, top1, top5
        return tuple(figure.to_global(sbp=self._replicated) for figure in (loss, top1, top5))


class GraphStep(TrainStep):
    """nn.Graph; with several processes parameters are replicated global tensors and the batch is
    split along its first axis."""

    TRAIN_STEP_KEY = "System-Train-TrainStep"
    MOMENTUM_SUFFIX = "-momentum"
    returns_global_figures = True

    def __init__(
        self, model: nn.Module, backend: Backend, *, amp: bool = False, **settings
    ) -> None:
        self._parallel = distributed.world_size() > 1
        self._local = model
        self._placement = backend.placement() if self._parallel else None
        if self._parallel:
            self._local = copy.deepcopy(model)
            model = model.to_global(placement=self._placement, sbp=flow.sbp.broadcast)
        super().__init__(model, backend, **settings)
        scheduler = flow.optim.lr_scheduler.StepLR(
            self.optimizer, step_size=DECAY_EVERY * self.steps_per_epoch, gamma=DECAY_FACTOR
        )
        self._graph = _TrainGraph(
            model, self.optimizer, scheduler, amp, flow.sbp.broadcast if self._parallel else None
        )
        self._compiled = False

    def step(self, images: np.ndarray, labels: np.ndarray, epoch: int) -> tuple[flow.Tensor, ...]:
        inputs = [flow.tensor(array, device=self.backend.device()) for array in (images, labels)]
        if self._parallel:
            inputs = [
                tensor.to_global(placement=self._placement, sbp=flow.sbp.split(0))
                for tensor in inputs
            ]
        self._compiled = True
        figures = self._graph(*inputs)
        if self._parallel:
            return tuple(figure.to_local() for figure in figures)
        return figures

    def local_model(self) -> nn.Module:
        if self._parallel:
            layouts.load_standard_state_dict(self._local, layouts.standard_state_dict(self.model))
        return self._local.eval()

    def momentum_state(self) -> dict[str, flow.Tensor]:
        if not self._compiled:
            return {}
        state = self._graph.state_dict()
        return {
            name: state[f"model.{name}{self.MOMENTUM_SUFFIX}"]
            for name, _ in self.model.named_parameters()
            if f"model.{name}{self.MOMENTUM_SUFFIX}" in state
        }

    def load_momentum(self, momentum: dict[str, np.ndarray], step: int) -> None:
        if self._compiled:
            raise RuntimeError("a graph takes its state before its first step")
        state = {
            f"model.{name}{self.MOMENTUM_SUFFIX}": self._graph_variable(array)
            for name, array in momentum.items()
        }
        state[self.TRAIN_STEP_KEY] = self._graph_variable(np.array([step], dtype=np.int64))
        state["model"] = self.model.state_dict()
        self._graph.load_state_dict(state)

    def _graph_variable(self, array: np.ndarray) -> flow.Tensor:
        tensor = flow.tensor(array, device=self.backend.device())
        if self._parallel:
            return tensor.to_global(placement=self._placement, sbp=flow.sbp.broadcast)
        return tensor
