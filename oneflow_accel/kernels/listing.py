"""Which CPU kernel an operator gets on this machine, and why: `python -m oneflow_accel kernels`.

The answer comes from OneFlow's own kernel registry, asked by the plug-in (csrc/common/
which_kernel.cpp), and not from a list that could grow old.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from oneflow_accel.errors import UserError, nearest
from oneflow_accel.kernels import plugin, registry

from rich.console import Console
from rich.table import Table

# Numbers of OneFlow's DataType (oneflow/core/common/data_type.proto).
_DATA_TYPES = {"float32": 2, "float64": 3, "bfloat16": 11}
# What which_kernel.cpp answers. It cannot tell where OneFlow's predicates ask for attributes; the
# plug-in has float32 of everything that it has.
_NONE, _STOCK, _IN_PLACE, _ALONE, _UNKNOWN = 0, 1, 2, 3, -1
_STUBS = ("layer_norm", "layer_norm_grad", "layer_norm_param_grad")


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of one operator: by dtype "plug-in", "oneflow", "none", or "?" where it depends
    on more; `why` is one sentence about float32."""

    operator: str
    kernels: dict[str, str]
    why: str


def kernel_choices(operators: Sequence[str] = ()) -> list[KernelChoice]:
    """The kernels of some operators, of all that the plug-in has where none is named. UserError if
    the plug-in, which asks the registry, is not loaded, or there is no such operator."""
    state = plugin.state()
    if not state.loaded:
        raise UserError(
            f"every operator runs on OneFlow's own kernel, if it has one: {state.reason}"
        )
    library = ctypes.CDLL(str(state.path))
    library.oneflow_accel_all_operators.restype = ctypes.c_char_p
    known = library.oneflow_accel_all_operators().decode().split()
    for name in operators:
        if name not in known:
            near = ", ".join(nearest(name, known, most=3, cutoff=0.5)) or "none"
            raise UserError(f"OneFlow has no operator '{name}'; names like it: {near}")
    choices = []
    for name in operators or state.operators:
        answers = {
            dtype: library.oneflow_accel_which_kernel(name.encode(), number)
            for dtype, number in _DATA_TYPES.items()
        }
        listed = name in state.operators
        kernels = {dtype: _kernel(answer, dtype, listed) for dtype, answer in answers.items()}
        choices.append(KernelChoice(name, kernels, _why(name, answers["float32"], listed)))
    return choices


def _kernel(answer: int, dtype: str, listed: bool) -> str:
    if answer == _UNKNOWN:
        return "plug-in" if listed and dtype == "float32" else "?"
    if answer == _STOCK and listed and dtype == "float32":
        return "?"
    return {_NONE: "none", _STOCK: "oneflow", _IN_PLACE: "plug-in", _ALONE: "plug-in"}[answer]


def _why(operator: str, answer: int, listed: bool) -> str:
    if operator in _STUBS and listed:
        return "OneFlow's own ends the process"
    if answer == _UNKNOWN:
        has = "the plug-in's has the higher priority" if listed else "the plug-in has none"
        return f"{has}; OneFlow's own depends on the operator's attributes"
    if answer == _STOCK and listed:
        return "it depends on the dtypes of inputs and outputs, which are not all the same"
    return {
        _NONE: "neither the plug-in nor OneFlow has a CPU kernel",
        _STOCK: "the plug-in has none",
        _IN_PLACE: "the plug-in's has the higher priority",
        _ALONE: "OneFlow has no CPU kernel of its own",
    }[answer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help="default: all that the plug-in has"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, width: int | None) -> int:
    """Print the choices; returns the exit code."""
    choices = kernel_choices(args.operators)
    if args.json:
        print(json.dumps([asdict(choice) for choice in choices], indent=2))
        return 0
    console = Console(width=width, file=sys.stdout)
    table = Table(title="CPU kernels by operator", title_justify="left")
    for column in ("operator", *_DATA_TYPES, "why (float32)"):
        table.add_column(column, overflow="fold")
    for choice in choices:
        table.add_row(choice.operator, *choice.kernels.values(), choice.why)
    console.print(table)
    if not args.operators:
        for name, operation in registry.operations().items():
            names = [i.describe() for i in operation.implementations]
            console.print(f"operation {name}: {', '.join([*names, 'reference'])}", markup=False)
    return 0
