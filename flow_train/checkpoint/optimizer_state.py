"""The state of an optimizer as arrays by parameter name: the one form that eager mode, nn.Graph and
checkpoints share.

    exp_avg/NAME, exp_avg_sq/NAME    AdamW's two moments
    momentum/NAME                    SGD's momentum
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from oneflow_accel import distributed
from oneflow_accel.agree import whole
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow
from oneflow import nn

# What eager optimizers call their state, and the suffix of the same variable under nn.Graph.
GRAPH_SUFFIXES = {
    "exp_avg": "-m",
    "exp_avg_sq": "-v",
    "max_exp_avg_sq": "-max_v",
    "momentum": "-momentum",
}
# How many steps a graph has done: int64, one element.
TRAIN_STEP = "System-Train-TrainStep"
# Where the name in a checkpoint is not that of the eager optimizer.
EAGER_KEYS = {"momentum": "momentum_buf"}


def kept_keys(optimizer: flow.optim.Optimizer) -> tuple[str, ...] | None:
    """What it keeps of a parameter; None where that is not known."""
    options = optimizer.param_groups[0].options
    if isinstance(optimizer, flow.optim.Adam | flow.optim.AdamW | flow.optim.LAMB):
        amsgrad = ("max_exp_avg_sq",) if options.get("amsgrad") else ()
        return ("exp_avg", "exp_avg_sq", *amsgrad)
    if isinstance(optimizer, flow.optim.SGD):
        return ("momentum",) if options["momentum"] else ()
    return None


def state_keys(optimizer: flow.optim.Optimizer) -> tuple[str, ...]:
    """The same; UserError where it is not known, as checkpoints would leave it out."""
    keys = kept_keys(optimizer)
    if keys is None:
        raise UserError(
            f"checkpoints do not know what {type(optimizer).__name__} keeps: take AdamW, Adam, "
            "LAMB or SGD, or add it to flow_train/checkpoint/optimizer_state.py"
        )
    return keys


def parameter_names(model: nn.Module, optimizer: flow.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters in the order of its groups."""
    names = {id(value): name for name, value in model.named_parameters()}
    return [names[id(value)] for group in optimizer.param_groups for value in group.parameters]


def eager_state(model: nn.Module, optimizer: flow.optim.Optimizer) -> dict[str, np.ndarray]:
    """The state by KEY/NAME; empty before the first step."""
    state = optimizer.state_dict()["state"]
    arrays = {}
    for index, name in enumerate(parameter_names(model, optimizer)):
        for key in state_keys(optimizer):
            tensor = state.get(index, {}).get(EAGER_KEYS.get(key, key))
            if tensor is not None:
                arrays[f"{key}/{name}"] = whole(tensor, to=None).numpy()
    return arrays


def load_eager_state(
    model: nn.Module, optimizer: flow.optim.Optimizer, arrays: Mapping[str, np.ndarray], step: int
) -> None:
    """Set the state and the number of steps done; no arrays at all leave the moments at zero.
    Errors are those of `checked`."""
    state = optimizer.state_dict()
    state["state"]["step"] = step
    names = parameter_names(model, optimizer)
    positions = {name: index for index, name in enumerate(names)}
    parameters = dict(model.named_parameters())
    for key, name, array in checked(model, optimizer, arrays):
        entry = state["state"].setdefault(positions[name], {})
        if parameters[name].is_global:
            value = flow.zeros_like(parameters[name])
            distributed.set_value(value, array)
        else:
            value = flow.tensor(np.ascontiguousarray(array))
        entry[EAGER_KEYS.get(key, key)] = value
    optimizer.load_state_dict(state)


def checked(
    model: nn.Module, optimizer: flow.optim.Optimizer, arrays: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(key, parameter name, array) for all that the optimizer keeps; CheckpointError if an array is
    missing, or of another shape than its parameter, or all are those of another optimizer."""
    keys = state_keys(optimizer)
    kept = {name.partition("/")[0] for name in arrays} & GRAPH_SUFFIXES.keys()
    if kept and not kept & set(keys):
        was = "sgd with momentum" if "momentum" in kept else "adamw"
        raise CheckpointError(
            f"the run's optimizer was {was} ({', '.join(sorted(kept))}), and this one is another; "
            f"go on with that one, optimizer={was.split()[0]}"
        )
    if not kept:
        return
    parameters = dict(model.named_parameters())
    for name in parameter_names(model, optimizer):
        for key in keys:
            array = arrays.get(f"{key}/{name}")
            shape = tuple(parameters[name].shape)
            if array is None:
                raise CheckpointError(f"the checkpoint has no {key} of {name}")
            if array.shape != shape:
                raise CheckpointError(
                    f"{key} of {name} has shape {array.shape} in the checkpoint, the parameter "
                    f"{shape}"
                )
            yield key, name, array


def by_parameter(
    convert: Callable[[str, np.ndarray, nn.Module], np.ndarray],
    arrays: Mapping[str, np.ndarray],
    model: nn.Module,
) -> dict[str, np.ndarray]:
    """Arrays by KEY/NAME, in another layout where NAME is a parameter that has two."""
    return {key: convert(key.partition("/")[2], array, model) for key, array in arrays.items()}
