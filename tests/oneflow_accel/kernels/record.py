"""The declarative record of an operator, from which test_records.py makes its tests.

It says how a user calls the operator, what it computes (float64 NumPy, written from the formula and
not from the kernel), its gradient, and the inputs to try; records/ has a list RECORDS per family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness

Shape = tuple[int, ...]
# An input of a case: the shape of standard normal values, or a function that makes the array
# (indices, masks, values of a special range).
Input = Shape | Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Inputs of one call.

    Attributes:
        inputs: the operator's tensors, in the order of `Record.call`.
        attributes: keyword arguments of `call`, `reference` and `gradient`.
        reduced: terms that each element of the output (and of a gradient) sums up.
    """

    name: str
    inputs: tuple[Input, ...]
    attributes: dict[str, Any]
    reduced: int = 1

    def shapes(self) -> list[Shape]:
        return [
            value if isinstance(value, tuple) else np.shape(value(np.random.default_rng(0)))
            for value in self.inputs
        ]

    def arrays(self) -> list[np.ndarray]:
        """The inputs; floating-point ones are float32. The same at every call."""
        generator = np.random.default_rng([len(self.name), *map(ord, self.name)])
        arrays = []
        for value in self.inputs:
            array = value(generator) if callable(value) else generator.standard_normal(value)
            array = np.asarray(array)
            arrays.append(array.astype(np.float32) if array.dtype.kind == "f" else array)
        return arrays


def case(name: str, *inputs: Input, reduced: int = 1, **attributes: Any) -> Case:
    return Case(name, inputs, attributes, reduced)


@dataclass(frozen=True)
class Layout:
    """Of global tensors over two processes: 'S(axis)', 'B' or 'P' for each input and the output."""

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Record:
    """An operator as its users see it.

    Attributes:
        operators: OneFlow's operators that the plug-in must have a kernel for.
        reference: float64 arrays (others as they are) and attributes to a float64 array.
        gradient: dy and the same arguments to one array (or None) for each input.
        layouts: global layouts to try with the case called "global".
        dtypes: of the floating-point inputs.
        gradient_dtypes: those of them in which gradients are checked.
        not_finite: how closely NaN and infinity in the inputs come out as in the reference.
    """

    name: str
    operators: tuple[str, ...]
    call: Callable[..., flow.Tensor]
    reference: Callable[..., np.ndarray]
    cases: Sequence[Case]
    gradient: Callable[..., tuple[np.ndarray | None, ...]] | None = None
    layouts: Sequence[Layout] = field(default_factory=tuple)
    dtypes: tuple[str, ...] = ("float32",)
    gradient_dtypes: tuple[str, ...] = ("float32", "float64")
    not_finite: Strictness = Strictness.EXACT
