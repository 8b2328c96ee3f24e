"""Training steps under nn.Graph.

Two things that nn.Graph does otherwise than eager mode are mended here, so that both give the same
losses: a schedule is compiled into the graph, and gradients would be clipped for each parameter
group by itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from oneflow_accel import layouts
from oneflow_accel.backends.base import Backend
from oneflow_accel.training import distributed
from oneflow_accel.training.validation import class_scores, count_correct

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.optim.lr_scheduler import _LRScheduler

from monarch_flow.engine.optimizer_state import GRAPH_SUFFIXES, checked, parameter_names, state_keys
from monarch_flow.engine.step import LabeledImages, Loss, TrainStep, _require
from monarch_flow.optim import hard_labels

_TRAIN_STEP = "System-Train-TrainStep"
# Kept until the process ends: freeing a graph waits until all processes free theirs.
_KEPT: list[nn.Graph] = []


class CompiledSchedule(_LRScheduler):
    """Any learning rate per step, as the table of pieces that a graph can be compiled with.

    Args:
        optimizer: its learning rate under the graph is the table's.
        learning_rate: of each step, counted from 0.
        steps: of the whole run; the last one's rate holds ever after.
    """

    def __init__(
        self, optimizer: flow.optim.Optimizer, learning_rate: Callable[[int], float], steps: int
    ) -> None:
        self.boundaries: list[int] = []
        self.rates = [learning_rate(0)]
        for step in range(1, steps):
            rate = learning_rate(step)
            if rate != self.rates[-1]:
                # A boundary is the last step of its piece.
                self.boundaries.append(step - 1)
                self.rates.append(rate)
        for group in optimizer.param_groups:
            # The table's rates are multiples of it.
            group["initial_lr"] = 1.0
        super().__init__(optimizer)

    def get_lr(self, base_lr: float, step: int) -> float:
        """Of eager mode; unused."""
        return base_lr

    def _generate_conf_for_graph(self, lr_conf: Any) -> None:
        table = lr_conf.piecewise_scaling_conf
        table.SetInParent()
        table.boundaries.extend(self.boundaries)
        table.scales.extend(self.rates)


class _TrainGraph(nn.Graph):
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: flow.optim.Optimizer,
        schedule: CompiledSchedule,
        precision: str,
        accumulate: int,
        replicated: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._replicated = replicated
        self.add_optimizer(optimizer, lr_sch=schedule)
        if accumulate > 1:
            self.config.set_gradient_accumulation_steps(accumulate)
        if precision != "32":
            dtype = flow.float16 if precision == "16" else flow.bfloat16
            self.config.enable_amp(True, dtype=dtype)
        if precision == "16":
            self.set_grad_scaler(flow.amp.GradScaler())

    def build(self, images: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, ...]:
        scores = class_scores(self.model(images))
        loss = self.loss(scores, labels)
        loss.backward()
        figures = (loss, *count_correct(scores, hard_labels(labels)))
        if self._replicated is None:
            return figures
        return tuple(figure.to_global(sbp=self._replicated) for figure in figures)


class GraphStep(TrainStep):
    """nn.Graph; with several processes parameters are replicated global tensors and the batch is
    split along its first axis.

    Args:
        make_optimizer: builds the optimizer over the model that the graph trains, which with
            several processes is a global copy.
        learning_rate: of each step, counted from 0.
        steps: of the whole run.
        accumulate: batches that each step takes, no more and no less.
    """

    returns_global_figures = True

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        make_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
        loss: Loss,
        *,
        learning_rate: Callable[[int], float],
        steps: int,
        accumulate: int = 1,
        **settings: Any,
    ) -> None:
        _require(backend, "graph", "trainer.graph=true", "trainer.graph=false")
        self._parallel = distributed.world_size() > 1
        self._local = model
        self._placement = backend.placement() if self._parallel else None
        if self._parallel:
            self._local = copy.deepcopy(model)
            model = model.to_global(placement=self._placement, sbp=flow.sbp.broadcast)
        optimizer = make_optimizer(model)
        if isinstance(optimizer, flow.optim.AdamW):
            _require(backend, "graph_adamw", "trainer.graph=true", "trainer.graph=false")
        super().__init__(model, backend, optimizer, loss, **settings)
        if self.clip is not None:
            _clip_together(optimizer, self.clip)
        self._graph = _TrainGraph(
            model,
            loss,
            optimizer,
            CompiledSchedule(optimizer, learning_rate, steps),
            self.precision,
            accumulate,
            flow.sbp.broadcast if self._parallel else None,
        )
        if self._parallel:
            _KEPT.append(self._graph)
        self._accumulate = accumulate
        self._compiled = False

    def step(self, batches: Sequence[LabeledImages], lr: float) -> tuple[flow.Tensor, ...]:
        if len(batches) != self._accumulate:
            raise ValueError(f"{len(batches)} batches for a graph of {self._accumulate}")
        arrays = [np.concatenate([b.images for b in batches])]
        arrays.append(np.concatenate([b.labels for b in batches]))
        inputs = [flow.tensor(array, device=self.backend.device()) for array in arrays]
        if self._parallel:
            inputs = [
                tensor.to_global(placement=self._placement, sbp=flow.sbp.split(0))
                for tensor in inputs
            ]
        self._compiled = True
        figures = self._graph(*inputs)
        if self._parallel:
            figures = [figure.to_local() for figure in figures]
        if self._accumulate == 1:
            return tuple(figures)
        # One entry per batch.
        loss, *counts = figures
        return (loss.mean(), *(count.sum() for count in counts))

    def evaluated_model(self) -> nn.Module:
        if self._parallel:
            layouts.load_standard_state_dict(self._local, layouts.standard_state_dict(self.model))
        return self._local.eval()

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        state = self._graph.state_dict()
        arrays = {}
        for name in parameter_names(self.model, self.optimizer):
            for key in state_keys(self.optimizer):
                variable = state.get(f"model.{name}{GRAPH_SUFFIXES[key]}")
                if variable is not None:
                    arrays[f"{key}/{name}"] = distributed.local_value(variable).numpy()
        return arrays

    def load_optimizer(self, arrays: dict[str, np.ndarray], step: int) -> None:
        if self._compiled:
            raise RuntimeError("a graph takes its state before its first step")
        state: dict[str, Any] = {
            f"model.{name}{GRAPH_SUFFIXES[key]}": self._variable(array)
            for key, name, array in checked(self.model, self.optimizer, arrays)
        }
        state[_TRAIN_STEP] = self._variable(np.array([step], dtype=np.int64))
        state["model"] = self.model.state_dict()
        self._graph.load_state_dict(state)

    def _variable(self, array: np.ndarray) -> flow.Tensor:
        tensor = flow.tensor(np.ascontiguousarray(array), device=self.backend.device())
        if self._parallel:
            return tensor.to_global(placement=self._placement, sbp=flow.sbp.broadcast)
        return tensor


def _clip_together(optimizer: flow.optim.Optimizer, clip: float) -> None:
    """Clip the gradients of all groups by their common norm.

    nn.Graph clips each group by its own. Groups that differ in weight decay only are compiled as
    one here, with the parameters that are not decayed as exceptions.
    """
    separate = optimizer._generate_conf_for_graph

    def together(train_conf: Any, vars_conf: Any) -> list[Any]:
        separate(train_conf, vars_conf)
        first, *others = train_conf.optimizer_conf
        rates = {
            name: conf.weight_decay_conf.weight_decay_rate
            for conf in train_conf.optimizer_conf
            for name in conf.variable_op_names
        }
        for conf in others:
            first.variable_op_names.extend(conf.variable_op_names)
        del train_conf.optimizer_conf[1:]
        decay = max(rates.values())
        if not set(rates.values()) <= {0.0, decay}:
            raise NotImplementedError("parameter groups with several weight decays")
        first.weight_decay_conf.weight_decay_rate = decay
        exceptions = [f"^{re.escape(name)}$" for name, rate in rates.items() if rate != decay]
        if exceptions:
            first.weight_decay_conf.excludes.pattern.extend(exceptions)
        first.clip_conf.clip_by_global_norm.max_norm = clip
        first.clip_conf.clip_by_global_norm.norm_type = 2.0
        return [train_conf.optimizer_conf[0]]

    optimizer._generate_conf_for_graph = together
