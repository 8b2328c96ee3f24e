"""The optimizer of a LiBai run as one part of its checkpoints, the same in eager mode and under
nn.Graph, so that a run goes on in the other mode with its moments.

    state          {"step": steps done, 0: {"exp_avg": tensor, ...}, ...} by number of the parameter
    param_groups   the settings, as the eager optimizer gives them
    names          of the parameters, by number
    graph          what only a graph has, such as the scale of the loss in float16; or nothing

LiBai writes the first two alone in eager mode, and a graph's variables by their own names under
nn.Graph (in a folder `graph`). Both are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import CheckpointError

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.optimizer_state import (
    EAGER_KEYS,
    GRAPH_SUFFIXES,
    TRAIN_STEP,
    parameter_names,
)

# The suffix of a graph's variable, by what the eager optimizer calls it.
_SUFFIXES = {EAGER_KEYS.get(key, key): suffix for key, suffix in GRAPH_SUFFIXES.items()}
# The name that LiBai's graphs give their model.
_MODEL = "model"


class OptimizerCheckpoint:
    """What a checkpoint keeps of an optimizer over a model's global tensors; `graph` is the
    training graph that has compiled it, None in eager mode. `names` are its parameters, in the
    order of their numbers."""

    def __init__(
        self, model: nn.Module, optimizer: flow.optim.Optimizer, graph: nn.Graph | None = None
    ) -> None:
        self._optimizer = optimizer
        self._graph = graph
        self.names = parameter_names(model, optimizer)
        self._shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """The form that the module describes; tensors are global, in the layout they have."""
        state: dict[str, Any] = {**self._optimizer.state_dict(), "names": list(self.names)}
        if self._graph is not None:
            values, extra = _of_graph(self._graph.state_dict(), self.names)
            numbers = {name: number for number, name in enumerate(self.names)}
            state["state"] = {numbers[name]: entries for name, entries in values.items()}
            # The number of steps is among them: a tensor that some processes do not have.
            state["graph"] = extra
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the moments and the number of steps from any of the forms above (tensors on rank 0
        of the host); the settings stay those of this run. Every process calls it, a graph before
        its first step. CheckpointError if it is of other parameters, or holds what this mode cannot
        take."""
        if "param_groups" in state:
            values, extra = self._of_optimizer(state), dict(state.get("graph", {}))
            steps = state["state"].get("step")
        else:
            values, extra = _of_graph(state, self.names)
            steps = None
        self._check(values)
        if self._graph is None:
            self._load_eagerly(values, extra, steps)
        else:
            self._load_into_graph(values, extra, steps)

    def _of_optimizer(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        # LiBai's own state has no names: it has the same parameters in the same order.
        names = state.get("names") or self.names
        if len(numbers) != len(self.names) or set(names) != set(self.names):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(numbers)} parameters, and this run's "
                f"{len(self.names)}, or others: resume with the configuration of that run"
            )
        return {names[number]: state["state"].get(number, {}) for number in numbers}

    def _check(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        wanted = _keys(self._optimizer)
        # Where a parameter takes no part in the loss, eager mode has none for it.
        found = {frozenset(entries) for entries in values.values() if entries}
        if wanted is not None and found != ({wanted} if wanted else set()):
            kept = " and ".join(sorted(set().union(*found))) or "nothing"
            raise CheckpointError(
                f"the checkpoint's optimizer keeps {kept} of a parameter, this run's "
                f"({type(self._optimizer).__name__}) {' and '.join(sorted(wanted)) or 'nothing'}: "
                "resume with the optimizer of that run, or start from its weights alone with "
                "train.load_weight"
            )
        for name, entries in values.items():
            for key, value in entries.items():
                if tuple(value.shape) != self._shapes[name]:
                    raise CheckpointError(
                        f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint, the "
                        f"parameter {self._shapes[name]}"
                    )

    def _load_eagerly(
        self, values: Mapping[str, Mapping[str, Any]], extra: Mapping[str, Any], steps: int | None
    ) -> None:
        unknown = [key for key in extra if key.startswith(f"{_MODEL}.")]
        if unknown:
            raise CheckpointError(
                f"the checkpoint is of nn.Graph and holds {unknown[0]}, which the optimizer does "
                "not have in eager mode; resume with graph.enabled=true"
            )
        if steps is None:
            steps = _number(extra[TRAIN_STEP])
        state = self._optimizer.state_dict()
        state["state"]["step"] = steps
        for number, name in enumerate(self.names):
            state["state"][number] = dict(values.get(name, {}))
        self._optimizer.load_state_dict(state)

    def _load_into_graph(
        self, values: Mapping[str, Mapping[str, Any]], extra: Mapping[str, Any], steps: int | None
    ) -> None:
        assert self._graph is not None
        variables = dict(extra)
        if steps is not None:
            variables[TRAIN_STEP] = flow.tensor(
                [steps], dtype=flow.int64, placement=_first_process(), sbp=flow.sbp.broadcast
            )
        for name, entries in values.items():
            for key, value in entries.items():
                if key not in _SUFFIXES:
                    raise CheckpointError(
                        f"the checkpoint is of eager mode and holds {key} of its optimizer, which "
                        "nn.Graph cannot take; resume with graph.enabled=false"
                    )
                variables[f"{_MODEL}.{name}{_SUFFIXES[key]}"] = value
        self._graph.load_state_dict(variables)


def _of_graph(
    variables: Mapping[str, Any], names: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What a graph keeps, by parameter and the eager optimizer's key, and the rest by its name."""
    places = {
        f"{_MODEL}.{name}{suffix}": (name, key)
        for name in names
        for key, suffix in _SUFFIXES.items()
    }
    values: dict[str, dict[str, Any]] = {}
    extra = {}
    # All processes go in one order, as the tensors are brought to one of them.
    for variable in sorted(variables):
        if variable in places:
            name, key = places[variable]
            values.setdefault(name, {})[key] = variables[variable]
        elif isinstance(variables[variable], flow.Tensor):
            extra[variable] = variables[variable]
    return values, extra


def _keys(optimizer: flow.optim.Optimizer) -> frozenset[str] | None:
    options = optimizer.param_groups[0].options
    if isinstance(optimizer, flow.optim.Adam | flow.optim.AdamW | flow.optim.LAMB):
        more = {"max_exp_avg_sq"} if options.get("amsgrad") else set()
        return frozenset({"exp_avg", "exp_avg_sq"} | more)
    if isinstance(optimizer, flow.optim.SGD):
        return frozenset({"momentum_buf"} if options["momentum"] else ())
    return None


def _first_process() -> flow.placement:
    return flow.placement("cpu", [0])


def _number(tensor: flow.Tensor) -> int:
    """The one element of a tensor of rank 0, on every process."""
    everywhere = flow.placement("cpu", list(range(flow.env.get_world_size())))
    return int(tensor.to_global(placement=everywhere, sbp=flow.sbp.broadcast).to_local().item())
