"""Optimizer steps of LiBai's models, eager and under its graph, in every layout of the processes.

Model, optimizer and inputs are global tensors, and so is the loss, which lies on the last stage.
LiBai's schedule sets the rates: its graph compiles it, with a count of its own, and its numbers
are not those of a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oneflow_accel import agree, distributed, precision
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.optim.lr_scheduler import _LRScheduler

from flow_train.checkpoint.optimizer_state import (
    EAGER_KEYS,
    GRAPH_SUFFIXES,
    TRAIN_STEP,
    checked,
    parameter_names,
    state_keys,
)
from flow_train.checkpoint.whole import Gathered
from flow_train.rng import seed_of
from flow_train.steps.eager import EagerStep, StepFigures, TrainStep
from flow_train.task import Batch, Sum
from libai_projects.engine.task import LibaiTask, replicas
from libai_projects.weights.old_runs import NUMBER

# Before the names of what only a graph keeps, such as the float16 loss scale.
_GRAPH = "graph/"


@dataclass(frozen=True)
class Maker:
    """Makes what trains a model of a config.

    Attributes:
        optimizer, schedule: of a model, and of that optimizer.
        graph: of a model, for evaluation; and to train, of an optimizer and a schedule, too. None
            to train eagerly.
    """

    optimizer: Callable[[nn.Module], flow.optim.Optimizer]
    schedule: Callable[[flow.optim.Optimizer], _LRScheduler]
    graph: Callable[..., nn.Graph] | None


class _LibaiStep(TrainStep):
    """What both have in common. `samples` are those of all processes that the run has taken."""

    returns_global_figures = True
    takes_rates = False
    task: LibaiTask
    schedule: _LRScheduler
    samples = 0

    @property
    def replicas(self) -> int:
        return replicas()

    @property
    def rate(self) -> float:
        """The learning rate of the step to come."""
        return float(self.schedule.get_last_lr()[0])

    def seed(self, seed: int, step: int) -> int | None:
        # Without the rank: the parts of a split tensor draw by their place in the whole.
        return seed_of(f"libai_projects {seed} iteration {step}")

    def _done(self, batch: Batch) -> None:
        self.schedule.step()
        self.samples += self.task.size(batch) * self.replicas

    def named_weights(self) -> Iterator[tuple[str, flow.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, agree.whole(parameter, to=None)

    def arrays(self) -> tuple[Gathered, Gathered]:
        return Gathered(self.model.state_dict()), Gathered(self._optimizer_tensors())

    def _optimizer_tensors(self) -> dict[str, flow.Tensor]:
        """The optimizer's state by KEY/NAME."""
        raise NotImplementedError

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        return {n: agree.whole(t, to=None).numpy() for n, t in self._optimizer_tensors().items()}

    def own(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        # LiBai's own eager checkpoints have the numbers of the parameters only.
        numbers = {f"{NUMBER}{n}": name for n, name in enumerate(self._parameter_names())}
        if not any(NUMBER in name for name in arrays):
            return arrays
        found = {}
        for name in arrays:
            key, _, parameter = name.partition("/")
            found[f"{key}/{numbers.get(parameter, parameter)}"] = arrays[name]
        return found

    def _parameter_names(self) -> list[str]:
        return parameter_names(self.model, self.optimizer)

    def state(self) -> dict[str, Any]:
        # LiBai's own form has the groups, and in them numbers in place of names: `old_runs.write`.
        groups = json.loads(json.dumps(self.optimizer.state_dict()["param_groups"]))
        return {
            "lr_scheduler": self.schedule.state_dict(),
            "consumed_samples": self.samples,
            "param_groups": groups,
            "parameters": self._parameter_names(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.samples = int(state["consumed_samples"])
        self.schedule.load_state_dict(state["lr_scheduler"])
        rates = self.schedule.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class LibaiEagerStep(_LibaiStep, EagerStep):
    """Eager steps: what sums up gradients over the processes is the layout of the tensors."""

    def __init__(self, model: nn.Module, backend: Backend, maker: Maker, *rest: Any, **kw: Any):
        EagerStep.__init__(self, model, backend, maker.optimizer(model), *rest, forward=model, **kw)
        self.schedule = maker.schedule(self.optimizer)
        # The clipping and the scale of losses are LiBai's, whose float16 has none in eager mode.
        self._scaler = None

    def step(self, batch: Batch, lr: float) -> StepFigures:
        found = super().step(batch, lr)
        self._done(batch)
        return _local(found)

    def _inputs(self, part: Batch) -> Mapping[str, flow.Tensor]:
        return self.task.laid_out(part)

    def _clipped(self, parameters: Sequence[flow.Tensor]) -> flow.Tensor | None:
        norm = _norm(parameters) if self.wants_norm else None
        self.optimizer.clip_grad()
        return norm

    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                yield name, agree.whole(parameter.grad, to=None)

    def evaluated_model(self) -> nn.Module:
        return self.model

    def _optimizer_tensors(self) -> dict[str, flow.Tensor]:
        state, found = self.optimizer.state_dict()["state"], {}
        parameters = dict(self.model.named_parameters())
        for number, name in enumerate(self._parameter_names()):
            for key in state_keys(self.optimizer):
                tensor = state.get(number, {}).get(EAGER_KEYS.get(key, key))
                # A parameter that takes no part in the loss has none.
                found[f"{key}/{name}"] = (
                    flow.zeros_like(parameters[name]) if tensor is None else tensor
                )
        return found

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        unknown = [name for name in arrays if name.startswith(f"{_GRAPH}model.")]
        if unknown:
            raise CheckpointError(
                f"the checkpoint is of nn.Graph and holds {unknown[0].removeprefix(_GRAPH)}, which "
                "the optimizer does not have in eager mode; resume with graph.enabled=true"
            )
        super().load_optimizer(arrays, step)


class LibaiGraphStep(_LibaiStep):
    """Steps of LiBai's graph, which splits a batch for its accumulation and clips by itself. Its
    masks are drawn from the seed that it is compiled with. `is_resumed`: that is of its first
    step, as a resumed run must not draw those again that it began with."""

    is_resumed = False

    def __init__(self, model: nn.Module, backend: Backend, maker: Maker, *rest: Any, **kw: Any):
        super().__init__(model, backend, maker.optimizer(model), *rest, **kw)
        assert maker.graph is not None
        self.schedule = maker.schedule(self.optimizer)
        self.graph = maker.graph(model, self.optimizer, self.schedule)
        self._evaluated = maker.graph(model, is_train=False)
        trace = partial(precision.autocast, backend, self.precision)
        self.graph.build = partial(_build, self.graph, trace)

    def seed(self, seed: int, step: int) -> int | None:
        first = self.is_resumed and not self.graph.is_compiled
        return super().seed(seed, step) if first else None

    def step(self, batch: Batch, lr: float) -> StepFigures:
        if self.before_update is not None:
            self.before_update()
        # Where a graph accumulates, each loss has an entry per part.
        losses = {n: each.mean() for n, each in self.graph(**self.task.laid_out(batch)).items()}
        self._done(batch)
        return _local(StepFigures(*self.task.total(losses)))

    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        raise UserError("a LiBai model under nn.Graph shows no gradients: train it eagerly")

    def evaluated_model(self) -> nn.Graph:
        return self._evaluated

    def close(self) -> None:
        distributed.end_graph(self.graph)
        distributed.end_graph(self._evaluated)

    def _optimizer_tensors(self) -> dict[str, flow.Tensor]:
        variables, names = self.graph.state_dict(), self._names()
        # All processes go in one order: the parameters', as layers are made of several.
        found = {key: variables[name] for name, key in names.items() if name in variables}
        for name in sorted(variables.keys() - names.keys() - {TRAIN_STEP}):
            if isinstance(variables[name], flow.Tensor):
                found[_GRAPH + name] = variables[name]
        return found

    def _names(self) -> dict[str, str]:
        """KEY/NAME by what the graph calls it."""
        return {
            f"model.{name}{GRAPH_SUFFIXES[key]}": f"{key}/{name}"
            for name in self._parameter_names()
            for key in state_keys(self.optimizer)
        }

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        variables = {
            f"model.{name}{GRAPH_SUFFIXES[key]}": _of_first(array)
            for key, name, array in checked(self.model, self.optimizer, arrays)
        }
        for name in arrays:
            if name.startswith(_GRAPH):
                variables[name.removeprefix(_GRAPH)] = _of_first(arrays[name])
        variables[TRAIN_STEP] = _of_first(np.array([step], np.int64))
        self.graph.load_state_dict(variables)


def _build(graph: nn.Graph, autocast: Callable[[], Any], **inputs: Any) -> dict[str, flow.Tensor]:
    """What is traced: LiBai's own, in the run's precision."""
    with autocast():
        losses: dict[str, flow.Tensor] = graph.model(**inputs)
    sum(losses.values()).backward()
    return losses


def _of_first(array: np.ndarray) -> flow.Tensor:
    """A tensor of the first process, from which a graph takes it to where it keeps it."""
    first = flow.placement("cpu", [0])
    tensor = flow.tensor(np.ascontiguousarray(array))
    return tensor.to_global(placement=first, sbp=flow.sbp.broadcast)


def _norm(parameters: Sequence[flow.Tensor]) -> flow.Tensor:
    """The norm of all gradients as if they were one vector; global, whole on the first stage."""
    found = [p.grad.detach() for p in parameters if p.grad is not None]
    replicated = [flow.sbp.broadcast] * len(found[0].sbp)
    norms = [flow.linalg.vector_norm(grad.to_global(sbp=replicated)) for grad in found]
    first = found[0].placement
    return flow.linalg.vector_norm(flow.stack([norm.to_global(placement=first) for norm in norms]))


def _local(figures: StepFigures) -> StepFigures:
    """The figures on every process, also of a stage that does not have them."""
    norm = figures.grad_norm
    return StepFigures(
        agree.whole(figures.loss, to=None),
        {n: Sum(agree.whole(each.total, to=None), each.count) for n, each in figures.sums.items()},
        None if norm is None else agree.whole(norm, to=None),
    )
