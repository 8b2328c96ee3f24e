"""Weights of linear layers as 8-bit integers with one float32 scale for each output, as files hold
them: `NAME` int8 and beside it `NAME.scales`, of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.generation import quantised

import numpy as np

from libai_projects.weights.table import State, Table

SCALES = ".scales"


def stored(state: Mapping[str, np.ndarray], table: Table) -> State:
    """Weights by Hugging Face's names with the prefix, float32, as a file of int8 has them."""
    result: State = {}
    for name, array in state.items():
        axis = table.output_axis(name.removeprefix(table.their_prefix))
        if axis is None:
            result[name] = array
        else:
            numbers, result[name + SCALES] = quantised(np.moveaxis(array, axis, 0))
            result[name] = np.moveaxis(numbers.astype(np.int8), 0, axis)
    return result


def widened(state: Mapping[str, np.ndarray], table: Table, where: Path) -> State:
    """The float32 weights of such a file; others are as they were. A UserError where the scales of
    a weight are missing or do not fit."""
    result = dict(state)
    for name, array in state.items():
        axis = table.output_axis(name.removeprefix(table.their_prefix))
        if array.dtype != np.int8 or array.ndim != 2 or axis is None:
            continue
        scales, outputs = result.pop(name + SCALES, None), array.shape[axis]
        if scales is None or scales.shape != (outputs,) or scales.dtype != np.float32:
            found = "there is none" if scales is None else f"not {scales.dtype} {scales.shape}"
            raise UserError(
                f"{where}: {name} is int8 and needs {name + SCALES}, float32 of shape "
                f"({outputs},), {found}; convert the model again"
            )
        result[name] = array * np.expand_dims(scales, 1 - axis)
    return result
