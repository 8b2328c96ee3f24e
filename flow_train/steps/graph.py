"""Training steps under nn.Graph.

What nn.Graph does otherwise than eager mode is mended here, so that both give the same losses: a
schedule is compiled into the graph, gradients would be clipped for each parameter group by itself,
random numbers would not follow the seed, and each step would take the same number of batches.
`step_maker`, at the end, chooses between eager steps and these.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from oneflow_accel import agree, distributed, layouts
from oneflow_accel import precision as precisions
from oneflow_accel.backends.base import Backend

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.optim.lr_scheduler import _LRScheduler

from flow_train.checkpoint.optimizer_state import (
    GRAPH_SUFFIXES,
    TRAIN_STEP,
    checked,
    parameter_names,
    state_keys,
)
from flow_train.options import Calendar, Position, TrainerOptions
from flow_train.sharding import sharding_options
from flow_train.steps.eager import (
    EagerStep,
    StepFigures,
    TrainStep,
    broadcast_buffers,
    require_feature,
)
from flow_train.steps.random_factors import DRAWS_FACTORS, Site, given_factors, recorded_sites
from flow_train.steps.sharding import ShardedStep
from flow_train.task import Batch, Sum, Task, to

logger = logging.getLogger("oneflow_accel")

# Kept until the process ends: freeing a graph waits until all processes free theirs.
_KEPT: list[nn.Graph] = []


class CompiledSchedule(_LRScheduler):
    """Any learning rate per step, counted from 0, as the table of pieces that a graph can be
    compiled with; the rate of the last of `steps` holds from then on. It sets the optimizer's
    `initial_lr`."""

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
            # The table's rates are multiples of `initial_lr`.
            group["initial_lr"] = 1.0
        super().__init__(optimizer)

    def get_lr(self, base_lr: float, step: int) -> float:
        """Eager mode's method; unused."""
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
        task: Task,
        optimizer: flow.optim.Optimizer,
        schedule: CompiledSchedule,
        backend: Backend,
        precision: str,
        accumulate: int,
        replicated: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._replicated = replicated
        # Those that are known when the graph is traced; the others are outputs.
        self.counts: dict[str, float] = {}
        self.add_optimizer(optimizer, lr_sch=schedule)
        if accumulate > 1:
            self.config.set_gradient_accumulation_steps(accumulate)
        # OneFlow's pass over a graph casts on CUDA only: elsewhere what is traced is cast already.
        self._traced_in: Callable[[], AbstractContextManager[Any]] = partial(
            precisions.autocast, backend, precision
        )
        if backend.supports("amp") and precision in precisions.CASTS:
            self.config.enable_amp(True, dtype=precisions.CASTS[precision])
            self._traced_in = nullcontext
        if precision == "float16":
            self.set_grad_scaler(flow.amp.GradScaler())

    def build(self, *inputs: flow.Tensor) -> tuple[flow.Tensor, ...]:
        names = self._task.inputs
        batch = dict(zip(names, inputs, strict=False))
        with self._traced_in(), given_factors(inputs[len(names) :]):
            loss, sums = self._task.loss(self.model, batch)
        loss.backward()
        figures = [loss]
        for name in self._task.figures:
            found = sums[name]
            figures.append(found.total)
            if isinstance(found.count, flow.Tensor):
                figures.append(found.count)
            else:
                self.counts[name] = found.count
        if self._replicated is None:
            return tuple(figures)
        return tuple(figure.to_global(sbp=self._replicated) for figure in figures)


class GraphStep(TrainStep):
    """nn.Graph; with several processes parameters are replicated global tensors and the batch is
    split along its first axis. `model` is local; `make_optimizer` gets the model that the graph
    trains, with several processes a global copy.

    The losses are those of eager steps, dropout and drop path included: their random factors are
    drawn eagerly, before the graph runs. A step of fewer parts than others, as at an epoch's end,
    gets a graph of its own, with the same parameters and optimizer state but memory for its own
    activations; all parts have `part_size` samples (ValueError).

    UserError as `TrainStep`, or if the device has no nn.Graph, or none for AdamW.
    """

    returns_global_figures = True

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        make_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
        task: Task,
        *,
        learning_rate: Callable[[int], float],
        steps: int,
        **settings: Any,
    ) -> None:
        require_feature(backend, "graph", "nn.Graph", "train eagerly")
        self._parallel = distributed.world_size() > 1
        self._local = model
        self._placement = backend.placement() if self._parallel else None
        if self._parallel:
            self._local = copy_model(model)
            model = model.to_global(placement=self._placement, sbp=flow.sbp.broadcast)
        optimizer = make_optimizer(model)
        if isinstance(optimizer, flow.optim.AdamW):
            require_feature(backend, "graph_adamw", "AdamW under nn.Graph", "train eagerly")
        super().__init__(model, backend, optimizer, task, **settings)
        if self.clip is not None:
            _clip_together(optimizer, self.clip)
        self._schedule = CompiledSchedule(optimizer, learning_rate, steps)
        self._factors = StepFactors(self._local, task, backend)
        # Graphs by the number of parts; made when needed, as compiling takes time.
        self._graphs: dict[int, _TrainGraph] = {}
        self._loaded: dict[str, flow.Tensor] = {}
        # The parts of the batch at hand, and the random factors of each.
        self._at_hand: tuple[list[Batch], list[list[flow.Tensor]]] | None = None

    def step(self, batch: Batch, lr: float) -> StepFigures:
        parts, size = self.parts(batch), self.task.size(batch)
        if len(parts) > 1 and size % len(parts):
            raise ValueError(f"{size} samples for a graph of {len(parts)} equal parts")
        factors = self._factors.draw(parts)
        if self.before_update is not None:
            self._at_hand = (parts, factors)
            self.before_update()
            self._at_hand = None
        given = to(self.backend.device(), batch)
        inputs = [given[name] for name in self.task.inputs]
        inputs += [
            each[0] if len(each) == 1 else flow.cat(each) for each in zip(*factors, strict=True)
        ]
        if self._parallel:
            inputs = [
                tensor.to_global(placement=self._placement, sbp=flow.sbp.split(0))
                for tensor in inputs
            ]
        graph = self._graph_of(len(parts))
        found = self._run(graph, inputs)
        self._count(len(parts))
        if self._parallel:
            found = [figure.to_local() for figure in found]
        loss, *figures = found
        if len(parts) > 1:
            # Each has one entry per part.
            loss, figures = loss.mean(), [figure.sum() for figure in figures]
        each = iter(figures)
        sums = {}
        for name in self.task.figures:
            total = next(each)
            known = graph.counts.get(name)
            sums[name] = Sum(total, next(each) if known is None else known * len(parts))
        return StepFigures(loss, sums)

    def _graph_of(self, parts: int) -> _TrainGraph:
        if parts not in self._graphs:
            graph = _TrainGraph(
                self.model,
                self.task,
                self.optimizer,
                self._schedule,
                self.backend,
                self.precision,
                parts,
                flow.sbp.broadcast if self._parallel else None,
            )
            # All graphs share these tensors, so each goes on with what another has updated.
            graph.load_state_dict(self._optimizer_tensors())
            self._graphs[parts] = graph
            if self._parallel:
                _KEPT.append(graph)
        return self._graphs[parts]

    def _run(self, graph: _TrainGraph, inputs: list[flow.Tensor]) -> Sequence[flow.Tensor]:
        compiles = not graph.is_compiled
        figures: Sequence[flow.Tensor] = graph(*inputs)
        if compiles:
            # Parameters keep the symbolic gradients of the graph compiled last, and the next one
            # would add its own to them.
            for parameter in self.model.parameters():
                parameter.grad = None
        return figures

    def _count(self, parts: int) -> None:
        """Count the parts that normalization layers have seen, which they do in Python."""
        for module in self.model.modules():
            seen = getattr(module, "num_batches_tracked", None)
            if module.training and seen is not None:
                seen.add_(parts)

    def close(self) -> None:
        for graph in self._graphs.values():
            if graph in _KEPT:
                distributed.end_graph(graph)
                _KEPT.remove(graph)

    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        """The step's gradients by an eager pass over its parts with the same random factors, in
        float32: a graph shows no gradients that are summed up over batches and processes."""
        if self._at_hand is None:
            raise RuntimeError("gradients are there inside before_update only")
        parts, factors = self._at_hand
        device = self.backend.device()
        # Work on a copy, because running statistics move.
        model = copy_model(self._present_model()).train()
        units = [self.task.units(part) for part in parts]
        for part, given, share in zip(parts, factors, units, strict=True):
            with given_factors(given):
                loss, _ = self.task.loss(model, to(device, part))
            (loss * (share / sum(units))).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                if self._parallel:
                    flow.comm.all_reduce(parameter.grad)
                yield name, parameter.grad / distributed.world_size()

    @property
    def local_model(self) -> nn.Module:
        return self._local

    def evaluated_model(self) -> nn.Module:
        model = self._present_model()
        # Global buffers are broadcast too: each process has gathered running statistics of its own
        # images.
        broadcast_buffers(model)
        return model.eval()

    def _present_model(self) -> nn.Module:
        """Local to this process, with the present parameters."""
        if self._parallel:
            layouts.load_standard_state_dict(self._local, layouts.standard_state_dict(self.model))
        return self._local

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        state = self._optimizer_tensors()
        arrays = {}
        for name in parameter_names(self.model, self.optimizer):
            for key in state_keys(self.optimizer):
                variable = state.get(f"model.{name}{GRAPH_SUFFIXES[key]}")
                if variable is not None:
                    arrays[f"{key}/{name}"] = agree.whole(variable, to=None).numpy()
        return arrays

    def _optimizer_tensors(self) -> dict[str, flow.Tensor]:
        """What the graphs keep besides the model, by their names; all of them have the same."""
        for graph in self._graphs.values():
            if graph.is_compiled:
                # Global ones. graph.state_dict() makes them local, and a graph that loads a local
                # tensor copies it on devices other than CPUs and GPUs.
                inner = graph._c_nn_graph
                names, tensors = inner.additional_var_names, inner.additional_var_tensors
                return dict(zip(names, tensors, strict=True))
        return self._loaded

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        if self._graphs:
            raise RuntimeError("a graph takes its state before its first step")
        self._loaded = {
            f"model.{name}{GRAPH_SUFFIXES[key]}": self._variable(array)
            for key, name, array in checked(self.model, self.optimizer, arrays)
        }
        self._loaded[TRAIN_STEP] = self._variable(np.array([step], dtype=np.int64))

    def _variable(self, array: np.ndarray) -> flow.Tensor:
        tensor = flow.tensor(np.ascontiguousarray(array), device=self.backend.device())
        if self._parallel:
            return tensor.to_global(placement=self._placement, sbp=flow.sbp.broadcast)
        return tensor


def _clip_together(optimizer: flow.optim.Optimizer, clip: float) -> None:
    """Clip the gradients of all groups by their common norm; nn.Graph clips each group by its own.
    Groups that differ in weight decay only are compiled as one here, with the parameters that are
    not decayed as exceptions."""
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


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy that trains the same parameters. `copy.deepcopy` of oneflow 0.9.0 makes every
    parameter one that requires a gradient, even a performer's random projection, which is never
    trained."""
    copied = copy.deepcopy(model)
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return copied


class StepFactors:
    """Draws what the eager step with the same seed would draw, for a model as trained, local to
    this process; it is copied and left as it is."""

    def __init__(self, model: nn.Module, task: Task, backend: Backend) -> None:
        self._model = model
        self._task = task
        self._backend = backend
        self._sites: list[Site] | None = None

    def draw(self, parts: Sequence[Batch]) -> list[list[flow.Tensor]]:
        """The factors of each part, in the order in which the model asks for them. The parts are of
        this process, all of one shape and always the same. RuntimeError if the model asks for
        factors whose first axis is not the batch."""
        if self._sites is None:
            self._sites = self._find(parts[0])
        device = self._backend.device()
        return [[site.draw(device) for site in self._sites] for _ in parts]

    def _find(self, part: Batch) -> list[Site]:
        """Find the sites by one forward pass of a copy in training mode."""
        if not any(hasattr(module, DRAWS_FACTORS) for module in self._model.modules()):
            return []
        device = self._backend.device()
        # Run a copy, because running statistics move.
        model = copy_model(self._model).train()
        with flow.no_grad(), recorded_sites(device) as sites:
            self._task.loss(model, to(device, part))
        for site in sites:
            if site.shape[0] % self._task.size(part):
                raise RuntimeError(
                    f"random factors of shape {site.shape} for {self._task.size(part)} "
                    f"{self._task.samples}: the first axis has to be the batch, or nn.Graph cannot "
                    "split it"
                )
        numbers = sum(int(np.prod(site.shape)) for site in sites)
        logger.info(
            "nn.Graph: %d random factors at %d places of the model are inputs, %.1f MB per batch",
            numbers,
            len(sites),
            numbers * 4 / 1e6,
        )
        return sites


MakeStep = Callable[[nn.Module, Position], TrainStep]


def step_maker(
    backend: Backend,
    options: TrainerOptions,
    calendar: Calendar,
    make_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
    task: Task,
    batch_size: int,
    sharding: Mapping[str, Any] | None = None,
) -> MakeStep:
    """How to train a model from a position on, as `options` say: eagerly or under nn.Graph, which
    is compiled with the calendar's learning rates, or cut over the processes. `batch_size` samples
    of a process go through the model at once; `sharding` is what `fully_shard` takes, where the
    options do not say it. The function that this gives raises UserError where the device cannot do
    what is asked for."""
    settings: dict[str, Any] = {"clip": options.clip, "precision": options.precision}
    settings["part_size"] = batch_size

    def make(model: nn.Module, position: Position) -> TrainStep:
        cut = sharding or (options.fsdp and sharding_options(options.fsdp))
        if cut:
            return ShardedStep(model, backend, make_optimizer, task, sharding=cut, **settings)
        if not options.graph:
            settings["reduce_dtype"] = options.reduce_dtype
            return EagerStep(model, backend, make_optimizer(model), task, **settings)
        begin = dataclasses.replace(position)
        return GraphStep(
            model,
            backend,
            make_optimizer,
            task,
            learning_rate=lambda step: calendar.learning_rate(max(step, begin.step), begin),
            steps=calendar.last_step(begin),
            **settings,
        )

    return make
