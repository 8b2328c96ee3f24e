"""What test_records.py and global_records.py share: running a record and judging the result."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.harness import as_array, as_held
from tests.oneflow_accel.kernels.record import Case, Layout, Record
from tests.tolerances import assert_close

GLOBAL_CASE = "global"
_FOLDER = Path(__file__).parent / "records"


def all_records() -> list[Record]:
    records: list[Record] = []
    for path in sorted(_FOLDER.glob("*.py")):
        module = importlib.import_module(f"tests.oneflow_accel.kernels.records.{path.stem}")
        records += module.RECORDS
    return records


def case_named(record: Record, name: str) -> Case:
    return next(case for case in record.cases if case.name == name)


def layout_name(layout: Layout) -> str:
    return f"{','.join(layout.inputs)}->{layout.output}"


def is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"


def arrays_in(case: Case, dtype: str) -> list[np.ndarray]:
    """The inputs with the values that `dtype` can hold: float64 for it, float32 for the others."""
    arrays = []
    for array in case.arrays():
        if is_float(array):
            array = as_held(array, dtype)
        arrays.append(array.astype(np.float64) if is_float(array) and dtype == "float64" else array)
    return arrays


def tensor_gradients(tensors: Sequence[flow.Tensor]) -> list[np.ndarray | None]:
    return [None if tensor.grad is None else as_array(tensor.grad) for tensor in tensors]


def tensors_of(arrays: Sequence[np.ndarray], dtype: str, gradient: bool) -> list[flow.Tensor]:
    tensors = []
    for array in arrays:
        tensor = flow.tensor(array)
        if is_float(array):
            tensor = tensor.to(getattr(flow, dtype)).detach()
            tensor.requires_grad = gradient
        tensors.append(tensor)
    return tensors


def in_float64(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.astype(np.float64) if is_float(array) else array for array in arrays]


def expected_output(record: Record, case: Case, arrays: Sequence[np.ndarray]) -> np.ndarray:
    # Cases have infinities.
    with np.errstate(all="ignore"):
        y = record.reference(*in_float64(arrays), **case.attributes)
    return np.asarray(y, dtype=np.float64)


def output_gradient(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """dy: the gradient of the loss sum(y * dy), float32 values that `dtype` can hold."""
    dy = np.random.default_rng([7, *shape]).standard_normal(shape).astype(np.float32)
    return as_held(dy, dtype)


def size(case: Case) -> int:
    """Elements of all inputs."""
    return sum(int(np.prod(shape)) for shape in case.shapes())


def largest_case(record: Record) -> Case:
    return max(record.cases, key=size)


def results(record: Record, case: Case, tensors: Sequence[flow.Tensor] = ()) -> np.ndarray:
    """All numbers of the output and of the gradients, of these tensors or the case's own."""
    gradient = record.gradient is not None
    tensors = tensors or tensors_of(case.arrays(), "float32", gradient)
    y = record.call(*tensors, **case.attributes)
    if gradient:
        y.backward(flow.tensor(output_gradient(tuple(y.shape))))
    arrays = [y.numpy(), *tensor_gradients(tensors)]
    return np.concatenate([array.ravel() for array in arrays if array is not None])


def assert_output(
    record: Record, case: Case, arrays: Sequence[np.ndarray], y: np.ndarray, dtype: str
) -> None:
    assert_close(y, expected_output(record, case, arrays), dtype=dtype, reduced=case.reduced)


def assert_gradients(
    record: Record,
    case: Case,
    arrays: Sequence[np.ndarray],
    dy: np.ndarray,
    actual: Sequence[np.ndarray | None],
    dtype: str,
) -> None:
    """`actual` holds one gradient for each input, None for those that have none."""
    with np.errstate(all="ignore"):
        expected = record.gradient(dy.astype(np.float64), *in_float64(arrays), **case.attributes)
    assert len(expected) == len(actual)
    for mine, reference in zip(actual, expected, strict=True):
        if reference is not None:
            assert mine is not None, "no gradient"
            assert_close(mine, np.asarray(reference), dtype=dtype, reduced=case.reduced)
