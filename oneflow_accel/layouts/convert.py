"""Turns a model into channels last and back, in place.

oneflow 0.9.0 has no memory formats: in channels last an activation's shape really is (N, H, W, C),
and a convolution's weight is (out, height, width, in / groups).
"""

from __future__ import annotations

from collections.abc import Iterator

from oneflow_accel.backends import Backend, current_backend
from oneflow_accel.errors import UserError
from oneflow_accel.layouts.forwards import as_channels_first, as_channels_last
from oneflow_accel.layouts.rules import RULES, channels_first_class, channels_last_class, class_name

from oneflow import nn

_FIRST, _LAST = 0, 1
_CLASS_OF_LAYOUT = (channels_first_class, channels_last_class)


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
    if is_channels_last(model) and all(_has_layout(m, _LAST) for m in model.modules()):
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
    _convert(model, _LAST)
    return model


def to_channels_first(model: nn.Module) -> nn.Module:
    """Undo `to_channels_last`, in place: layout, classes and weights are what they were."""
    if is_channels_last(model):
        _convert(model, _FIRST)
    return model


def _convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def _has_layout(module: nn.Module, layout: int) -> bool:
    cls = type(module)
    rule = RULES.get(class_name(cls))
    if rule is None or _CLASS_OF_LAYOUT[layout](cls) is not cls:
        return False
    return all(getattr(module, name) == values[layout] for name, values in rule.attributes.items())


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
    elif not _has_layout(module, _FIRST):
        yield "built under ONEFLOW_ENABLE_NHWC=1; unset that and build it again"
    else:
        yield from filter(None, (obstacle(module) for obstacle in rule.obstacles))


def _convert(model: nn.Module, layout: int) -> None:
    permute = as_channels_last if layout == _LAST else as_channels_first
    done = set()
    for module in model.modules():
        for name, values in RULES[class_name(type(module))].attributes.items():
            setattr(module, name, values[layout])
        module.__class__ = _CLASS_OF_LAYOUT[layout](type(module))
        # Two convolutions may share one weight.
        if isinstance(module, nn.Conv2d) and id(module.weight) not in done:
            weight, gradient = module.weight, module.weight.grad
            weight.data = permute(weight.detach()).contiguous()
            weight.grad = None if gradient is None else permute(gradient).contiguous()
            done.add(id(weight))
