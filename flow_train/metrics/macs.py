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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import ShardLayout
from flow_train.cli import text_table

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


def count_parameters(model: nn.Module, layout: ShardLayout | None = None) -> ParameterCount:
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
    for all that is in it; is an nn.Linear or nn.Conv2d (of which `macs_per_position`, if there, is
    for one of its output's); or has `own_macs(shape)`, for what its forward does besides calling
    its children.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    channels = getattr(model, "in_chans", 3) if in_chans is None else in_chans
    like = next(model.parameters())
    return macs_of_call(model, flow.zeros(1, channels, *size, dtype=like.dtype, device=like.device))


def macs_of_call(model: nn.Module, *inputs: Any) -> list[ModuleMacs]:
    """Likewise for a model that takes something else than images: `inputs` are its arguments, and
    the figures are for all that they hold."""
    counted, calls = list(_counted(model, "", set())), dict[str, ModuleMacs]()
    training = [(module, module.training) for module in model.modules()]
    # Not register_forward_hook: it gives no handle to remove the hook by.
    key = object()
    for uncalled, module, rule in counted:
        module._forward_hooks[key] = partial(_note, calls, uncalled, rule)
    model.eval()
    try:
        with flow.no_grad():
            model(*inputs)
    finally:
        for module, was_training in training:
            module.training = was_training
        for _, module, _ in counted:
            del module._forward_hooks[key]
    return [calls[uncalled.name] for uncalled, _, _ in counted if uncalled.name in calls]


def _note(
    calls: dict[str, ModuleMacs],
    uncalled: ModuleMacs,
    rule: Rule,
    module: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    """Add a call of a module to those before."""
    shape = tuple(args[0].shape)
    before = calls.get(uncalled.name, replace(uncalled, shape=shape))
    calls[uncalled.name] = replace(before, macs=before.macs + rule(shape, tuple(output.shape)))


def _counted(
    module: nn.Module, name: str, done: set[int]
) -> Iterator[tuple[ModuleMacs, nn.Module, Rule]]:
    """The modules that are counted by themselves, uncalled, and what a call costs; each once,
    wherever it stands."""
    if id(module) in done:
        return
    done.add(id(module))
    rule, is_whole = _rule(module)
    if rule is not None:
        numbers = sum(p.numel() for p in module.parameters(recurse=is_whole))
        yield ModuleMacs(name, type(module).__name__, (), numbers, 0), module, rule
    for child_name, child in () if is_whole else module.named_children():
        yield from _counted(child, f"{name}.{child_name}" if name else child_name, done)


def _rule(module: nn.Module) -> tuple[Rule | None, bool]:
    """What a call of the module costs, and whether that is for all that is in it."""
    if hasattr(module, "macs_per_row"):
        per_row = module.macs_per_row()
        return lambda shape, out: math.prod(shape[:-1]) * per_row, True
    if isinstance(module, nn.Linear):
        # Not by the weight, of which this process may have a piece only.
        weights = module.in_features * module.out_features
        return lambda shape, out: math.prod(shape[:-1]) * weights, True
    if isinstance(module, nn.Conv2d):
        per_output = module.in_channels // module.groups * math.prod(module.kernel_size)
        per_position = getattr(module, "macs_per_position", module.out_channels * per_output)
        return lambda shape, out: math.prod(out) // module.out_channels * per_position, True
    if hasattr(module, "own_macs"):
        return lambda shape, out: module.own_macs(shape), False
    return None, False


def macs_table(modules: Sequence[ModuleMacs], parameters: int) -> str:
    """A text table of `macs_by_module`'s modules; those that differ only in a number within their
    names are one row, and the rest of the model's `parameters` is a row "other". Columns: name,
    class, how many, shape of the input, parameters and multiply-accumulates in millions, the last
    two over all modules of a row; then the sums."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for module in modules:
        name = ".".join("*" if part.isdigit() else part for part in module.name.split("."))
        row = rows.setdefault((name, module.kind, " x ".join(map(str, module.shape))), [0, 0, 0])
        for column, number in enumerate((1, module.parameters, module.macs)):
            row[column] += number
    counted, macs = (sum(row[column] for row in rows.values()) for column in (1, 2))
    cells = [("module", "class", "times", "input", "parameters", "MMACs")]
    for (name, kind, shape), (times, numbers, cost) in rows.items():
        cells.append((name, kind, str(times), shape, f"{numbers:,}", f"{cost / 1e6:,.2f}"))
    cells.append(("other", "", "", "", f"{parameters - counted:,}", ""))
    cells.append(("all", "", "", "", f"{parameters:,}", f"{macs / 1e6:,.2f}"))
    return text_table(cells, "<<><>>")
