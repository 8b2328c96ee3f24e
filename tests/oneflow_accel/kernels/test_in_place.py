"""In place on memory that an operand lies in: the operand counts with the values it had before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import needs_plugin
from tests.tolerances import assert_close

pytestmark = needs_plugin

# Several threads' work, in rows that are no whole number of vectors.
SHAPE = (301, 401)

OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], np.ndarray]]] = {
    "add_": (lambda x, y: x.add_(y), lambda x, y: x + y),
    "iadd": (lambda x, y: x.__iadd__(y), lambda x, y: x + y),
    "sub_": (lambda x, y: x.sub_(y), lambda x, y: x - y),
    "mul_": (lambda x, y: x.mul_(y), lambda x, y: x * y),
    "div_": (lambda x, y: x.div_(y), lambda x, y: x / y),
    "copy_": (lambda x, y: x.copy_(y), lambda x, y: np.broadcast_to(y, x.shape)),
    "addcmul_": (lambda x, y: x.addcmul_(y, y), lambda x, y: x + y * y),
    "addcdiv_": (lambda x, y: x.addcdiv_(y, y), lambda x, y: x + 1.0),
    "masked_fill_": (
        lambda x, y: x.masked_fill_(y > 1.5, 3.0),
        lambda x, y: np.where(y > 1.5, 3.0, x),
    ),
}
# Where in x the operand lies; the same for tensors and arrays.
OPERANDS: dict[str, Callable[[Any], Any]] = {
    "first row": lambda x: x[0],
    "later row": lambda x: x[150],
    "row as a matrix": lambda x: x[7:8],
    "column": lambda x: x[:, :1],
    "last column": lambda x: x[:, -1:],
    "element": lambda x: x[0, 0],
    "later element": lambda x: x[200, 3],
    "every other element": lambda x: x[:, ::2][:, 3:4],
    "all of it": lambda x: x,
}
# Two parts of x that overlap without being the same: (what is changed, the operand).
SHIFTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the row before": (lambda x: x[1:], lambda x: x[:-1]),
    "the row after": (lambda x: x[:-1], lambda x: x[1:]),
    "the element before": (lambda x: x[3][1:], lambda x: x[3][:-1]),
    "the element after": (lambda x: x[3][:-1], lambda x: x[3][1:]),
}
# Those that have kernels in bfloat16 too.
ARITHMETIC = ("add_", "iadd", "sub_", "mul_", "div_")


def _array(dtype: str) -> np.ndarray:
    """Values from 1 to 2 that the dtype has."""
    array = np.random.default_rng(5).uniform(1.0, 2.0, SHAPE).astype(np.float32)
    return flow.tensor(array).to(getattr(flow, dtype)).to(flow.float32).numpy()


def _cases() -> list[Any]:
    return [
        pytest.param(operation, dtype, id=f"{operation}-{dtype}")
        for operation in OPERATIONS
        for dtype in ("float32", "bfloat16")
        if dtype == "float32" or operation in ARITHMETIC
    ]


@pytest.mark.parametrize(("operation", "dtype"), _cases())
def test_operand_that_lies_in_the_output(operation: str, dtype: str) -> None:
    change, reference = OPERATIONS[operation]
    for name, operand in OPERANDS.items():
        array = _array(dtype)
        x = flow.tensor(array).to(getattr(flow, dtype))
        change(x, operand(x))
        wide = array.astype(np.float64)
        try:
            assert_close(x.to(flow.float32).numpy(), reference(wide, operand(wide)), dtype=dtype)
        except AssertionError as error:
            raise AssertionError(f"x.{operation}({name} of x)") from error


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("operation", [*ARITHMETIC, "copy_"])
def test_operand_that_overlaps_the_output(operation: str, name: str) -> None:
    change, reference = OPERATIONS[operation]
    part, operand = SHIFTED[name]
    array = _array("float32")
    x = flow.tensor(array)
    change(part(x), operand(x))
    expected = array.astype(np.float64)
    part(expected)[...] = reference(part(expected).copy(), operand(expected).copy())
    assert_close(x.numpy(), expected)


def test_sum_of_three_whose_terms_overlap_the_output() -> None:
    array = _array("float32")
    x = flow.tensor(array)
    flow._C.add([x[1:-1], x[:-2], x[2:]], inplace=True)
    expected = array.astype(np.float64)
    expected[1:-1] = expected[1:-1] + expected[:-2] + expected[2:]
    assert_close(x.numpy(), expected)
