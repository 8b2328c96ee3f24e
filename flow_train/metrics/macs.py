"""Counts multiply-accumulates of a model, and its parameters.

One forward pass of one image tells which shapes each module gets; what it costs is computed from
its formula. So structured layers and products inside attention count as what they are, which
counters that trace operators do not see. Papers call this figure FLOPs.

Counted are linear layers, convolutions, structured layers and products inside attention; not
counted are biases, normalization, activations and softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import Layout

Shape = tuple[int, ...]
# From the shapes of a module's first input and its output to the multiply-accumulates of a call.
Rule = Callable[[Shape, Shape], int]


class ParameterCount(NamedTuple):
    """Numbers of values in a model's parameters; buffers are not counted."""

    total: int
    trainable: int

    @property
    def not_trainable(self) -> int:
        return self.total - self.trainable


@dataclass(frozen=True)
class ModuleMacs:
    """What one module costs for one image. `shape` is that of its first input; `parameters` and
    `macs`, of all its calls, leave out modules inside it that are counted by themselves."""

    name: str
    kind: str
    shape: Shape
    parameters: int
    macs: int


def count_parameters(model: nn.Module, layout: Layout | None = None) -> ParameterCount:
    """Of whole tensors, also where `layout` says that the model has pieces of them."""
    groups = {} if layout is None else layout.groups
    total = trainable = 0
    for name, parameter in model.named_parameters():
        whole = sum(slot.size for slot in groups[name][0]) if name in groups else parameter.numel()
        total += whole
        trainable += whole if parameter.requires_grad else 0
    return ParameterCount(total, trainable)


def count_macs(
    model: nn.Module, image_size: int | Sequence[int], in_chans: int | None = None
) -> int:
    """Multiply-accumulates of a forward pass of one image. The model is local; it runs once in eval
    mode and is left as it was. `image_size` is height and width, or one number for a square;
    `in_chans` None takes the model's attribute `in_chans`, or 3."""
    return sum(module.macs for module in macs_by_module(model, image_size, in_chans))


def macs_by_module(
    model: nn.Module, image_size: int | Sequence[int], in_chans: int | None = None
) -> list[ModuleMacs]:
    """The modules that cost something, in the order of the model; see `count_macs`.

    A module is counted by itself if it has `macs_per_row()`, which is for one row of its input and
    for all that is in it; is an nn.Linear or nn.Conv2d; or has `own_macs(shape)`, for what its
    forward does besides calling its children.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    channels = getattr(model, "in_chans", 3) if in_chans is None else in_chans
    like = next(model.parameters())
    return macs_of_call(model, flow.zeros(1, channels, *size, dtype=like.dtype, device=like.device))


def macs_of_call(model: nn.Module, *inputs: Any) -> list[ModuleMacs]:
    """Likewise for a model that takes something else than images: `inputs` are its arguments, and
    the figures are for all that they hold."""
    counted = list(_counted(model, "", set()))
    calls: dict[str, tuple[Shape, int]] = {}
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with _recording(counted, calls), flow.no_grad():
            model(*inputs)
    finally:
        for module, was_training in training:
            module.training = was_training
    called = [(item, *calls[item.name]) for item in counted if item.name in calls]
    return [
        ModuleMacs(item.name, type(item.module).__name__, shape, item.parameters, macs)
        for item, shape, macs in called
    ]


@dataclass(frozen=True)
class _Counted:
    """A module that is counted by itself, with or without what is in it."""

    name: str
    module: nn.Module
    rule: Rule
    whole: bool

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters(recurse=self.whole))


def _counted(module: nn.Module, name: str, done: set[int]) -> Iterator[_Counted]:
    # Record each module once, wherever it stands: what is noted is all its calls.
    if id(module) in done:
        return
    done.add(id(module))
    rule = _rule_of_whole(module)
    if rule is not None:
        yield _Counted(name, module, rule, whole=True)
        return
    if hasattr(module, "own_macs"):
        yield _Counted(name, module, lambda shape, out: module.own_macs(shape), whole=False)
    for child_name, child in module.named_children():
        yield from _counted(child, f"{name}.{child_name}" if name else child_name, done)


def _rule_of_whole(module: nn.Module) -> Rule | None:
    if hasattr(module, "macs_per_row"):
        per_row = module.macs_per_row()
        return lambda shape, out: math.prod(shape[:-1]) * per_row
    if isinstance(module, nn.Linear):
        # Not by the weight, of which this process may have a piece only.
        weights = module.in_features * module.out_features
        return lambda shape, out: math.prod(shape[:-1]) * weights
    if isinstance(module, nn.Conv2d):
        per_output = module.in_channels // module.groups * math.prod(module.kernel_size)
        return lambda shape, out: math.prod(out) * per_output
    return None


@contextmanager
def _recording(counted: Sequence[_Counted], calls: dict[str, tuple[Shape, int]]) -> Iterator[None]:
    """Note for each module the shape of its first input and the sum over its calls."""
    # Not register_forward_hook: it gives no handle to remove the hook by.
    key = object()
    for item in counted:
        item.module._forward_hooks[key] = _hook(item, calls)
    try:
        yield
    finally:
        for item in counted:
            del item.module._forward_hooks[key]


def _hook(
    item: _Counted, calls: dict[str, tuple[Shape, int]]
) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shape = tuple(args[0].shape)
        first, macs = calls.get(item.name, (shape, 0))
        calls[item.name] = (first, macs + item.rule(shape, tuple(output.shape)))

    return hook


def macs_table(modules: Sequence[ModuleMacs], parameters: int) -> str:
    """A text table of `macs_by_module`'s modules; those that differ only in a number within their
    names are one row, and the rest of the model's `parameters` is a row "other". Columns: name,
    class, how many, shape of the input, parameters and multiply-accumulates in millions, the last
    two over all modules of a row; then the sums."""
    rows: dict[tuple[str, str, Shape], list[ModuleMacs]] = {}
    for module in modules:
        key = (_without_numbers(module.name), module.kind, module.shape)
        rows.setdefault(key, []).append(module)
    cells = [("module", "class", "times", "input", "parameters", "MMACs")]
    for (name, kind, shape), group in rows.items():
        shown = " x ".join(map(str, shape))
        cells.append((name, kind, str(len(group)), shown, *_sums(group)))
    all_parameters = sum(module.parameters for module in modules)
    cells.append(("other", "", "", "", f"{parameters - all_parameters:,}", ""))
    total = ModuleMacs("", "", (), parameters, sum(module.macs for module in modules))
    cells.append(("all", "", "", "", *_sums([total])))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(_line(row, widths) for row in cells)


def _sums(group: Sequence[ModuleMacs]) -> tuple[str, str]:
    parameters = sum(module.parameters for module in group)
    return f"{parameters:,}", f"{sum(module.macs for module in group) / 1e6:,.2f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    # Text to the left, numbers to the right.
    cells = [
        cell.ljust(width) if column in (0, 1, 3) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
