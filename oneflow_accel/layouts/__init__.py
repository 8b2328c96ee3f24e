"""Channels last (NHWC): turns a model into it, in place; its state dicts in the standard layout.

oneflow 0.9.0 has no memory formats: in channels last an activation's shape really is (N, H, W, C),
and a convolution's weight is (out, height, width, in / groups). Checkpoints hold the standard
layout (NCHW, OIHW weights), so that any model, of any framework, can read them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import whole
from oneflow_accel.backends import Backend, current_backend
from oneflow_accel.errors import UserError
from oneflow_accel.layouts.rules import (
    RULES,
    as_channels_first,
    as_channels_last,
    channels_first_class,
    channels_last_class,
    class_name,
)

import numpy as np
import oneflow as flow
from oneflow import nn

logger = logging.getLogger("oneflow_accel")


def is_channels_last(model: nn.Module) -> bool:
    """Whether the model takes (N, H, W, C)."""
    return any(module.channel_pos == "channels_last" for module in _convolutions(model))


def to_channels_last(model: nn.Module, backend: Backend | None = None) -> nn.Module:
    """Convert a model, in place, so that its input is (N, H, W, C). Its output does not change.

    Call it before the model is wrapped (DistributedDataParallel, nn.Graph) or made global. The
    parameters stay the same objects, so an optimizer may exist already if it has no state yet. The
    model is flowvision's, of a family in `rules.py`, or a Sequential of plain layers.

    Raises:
        UserError: the device (None: the selected one) has no channels-last kernels, or the
            model has modules that cannot be converted, which the text names; nothing has been
            changed then.
    """
    if is_channels_last(model) and all(_has_layout(m, last=True) for m in model.modules()):
        return model
    support = (backend or current_backend()).supports("nhwc")
    if not support:
        raise UserError(f"channels last is not available on this device: {support.reason}")
    obstacles = list(_obstacles(model))
    if obstacles:
        shown = "".join(f"\n  {line}" for line in obstacles[:8])
        more = f"\n  and {len(obstacles) - 8} more" if len(obstacles) > 8 else ""
        raise UserError(
            f"{type(model).__name__} cannot be converted to channels last; run it without. "
            f"What stands in the way:{shown}{more}"
        )
    # Modules keep their identity and parameters; what changes is their class, whose forward takes
    # the other axes, and the memory of convolutions' weights.
    done = set()
    for module in model.modules():
        cls: Any = type(module)
        for name, (_, last) in RULES[class_name(cls)].attributes.items():
            setattr(module, name, last)
        module.__class__ = channels_last_class(cls)
        # Two convolutions may share one weight.
        if isinstance(module, nn.Conv2d) and id(module.weight) not in done:
            weight, gradient = module.weight, module.weight.grad
            weight.data = as_channels_last(weight.detach()).contiguous()
            weight.grad = None if gradient is None else as_channels_last(gradient).contiguous()
            done.add(id(weight))
    return model


def _convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def _has_layout(module: nn.Module, *, last: bool) -> bool:
    cls = type(module)
    rule = RULES.get(class_name(cls))
    of_layout = channels_last_class if last else channels_first_class
    if rule is None or of_layout(cls) is not cls:
        return False
    return all(getattr(module, name) == values[last] for name, values in rule.attributes.items())


def _obstacles(model: nn.Module) -> Iterator[str]:
    """Why the model cannot be converted: one line for each module class and reason."""
    if not _convolutions(model):
        yield "it has no Conv2d"
    seen = set()
    for path, module in model.named_modules():
        name = class_name(type(module))
        for reason in _module_obstacles(module):
            if (name, reason) not in seen:
                yield f"{path or 'the model itself'} ({name}): {reason}"
            seen.add((name, reason))


def _module_obstacles(module: nn.Module) -> Iterator[str]:
    rule = RULES.get(class_name(type(module)))
    if any(parameter.is_global for parameter in module.parameters(recurse=False)):
        yield "it is global already; convert it before .to_global()"
    if "forward" in vars(module):
        yield "its forward has been replaced"
    if rule is None:
        yield "this class has no channels-last form"
    elif not _has_layout(module, last=False):
        yield "built under ONEFLOW_ENABLE_NHWC=1; unset that and build it again"
    else:
        yield from filter(None, (obstacle(module) for obstacle in rule.obstacles))


_OPTIONAL_SUFFIX = "num_batches_tracked"
# How many names of each kind a message lists.
_MOST_NAMES = 3


def standard_state_dict(model: nn.Module) -> dict[str, flow.Tensor]:
    """Parameters and buffers by name, in the standard layout: local tensors, detached, on the
    model's device. A tensor whose layout is standard already shares the model's memory. Global
    tensors are gathered: every process of their placement has to call this."""
    channels_last = set(_channels_last_weights(model))
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor, to=None)
        state[name] = as_channels_first(tensor).contiguous() if name in channels_last else tensor
    return state


def load_standard_state_dict(
    model: nn.Module, state: Mapping[str, np.ndarray | flow.Tensor], strict: bool = True
) -> None:
    """Copy a state dict in the standard layout into the model, local or global, converting dtype
    and layout. Counters `num_batches_tracked`, which old checkpoints lack, may be missing; the
    model keeps its own then. Without `strict` other missing and unexpected names are logged.

    Raises:
        UserError: names the first missing, unexpected and mis-shaped entries of each kind, and
            says how many more there are. The model is unchanged.
    """
    own = model.state_dict()
    # In the model's order: files keep them in any, and processes copy global tensors together.
    arrays = {name: _to_numpy(state[name]) for name in own if name in state}
    missing = [name for name in own if name not in arrays and not name.endswith(_OPTIONAL_SUFFIX)]
    unexpected = sorted(name for name in state if name not in own)
    channels_last = set(_channels_last_weights(model))
    wrong = []
    for name, array in arrays.items():
        shape = tuple(own[name].shape)
        if name in channels_last:
            shape = (shape[0], shape[3], shape[1], shape[2])
        if array.shape != shape:
            wrong.append(f"{name}: {array.shape} in the weights, {shape} in the model")
    lists = {"missing": missing, "unexpected": unexpected, "of another shape": wrong}
    text = "".join(f"\n  {kind}: {_some_of(names)}" for kind, names in lists.items() if names)
    if wrong or (strict and text):
        raise UserError(f"the weights do not fit {type(model).__name__}:{text}")
    if text:
        logger.warning("the weights fit %s in part:%s", type(model).__name__, text)
    with flow.no_grad():
        for name, array in arrays.items():
            layout = array.transpose(0, 2, 3, 1) if name in channels_last else array
            distributed.set_value(own[name], layout)


def _some_of(names: list[str]) -> str:
    """As many as somebody reads; another model's weights differ in hundreds."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f", and {more} more" if more > 0 else "")


def standard_array(parameter_name: str, array: np.ndarray, model: nn.Module) -> np.ndarray:
    """An array that goes with a parameter (a gradient, a momentum) in the standard layout,
    contiguous; `array` has the model's present one."""
    return _permuted(parameter_name, array, model, (0, 3, 1, 2))


def layout_array(parameter_name: str, array: np.ndarray, model: nn.Module) -> np.ndarray:
    """Inverse of `standard_array`: from the standard layout to the model's present one."""
    return _permuted(parameter_name, array, model, (0, 2, 3, 1))


def _permuted(name: str, array: np.ndarray, model: nn.Module, axes: tuple[int, ...]) -> np.ndarray:
    if array.ndim == 4 and name in _channels_last_weights(model):
        return np.ascontiguousarray(array.transpose(axes))
    return array


def _channels_last_weights(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names, in the state dict, of the weights that are not in the standard layout. Not by
    `named_modules`, which gives one name to a module that the state dict has under several."""
    if isinstance(module, nn.Conv2d) and module.channel_pos == "channels_last":
        yield f"{prefix}weight"
    for name, child in module._modules.items():
        if child is not None:
            yield from _channels_last_weights(child, f"{prefix}{name}.")


def _to_numpy(value: np.ndarray | flow.Tensor) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else whole(value, to=None).numpy()
