"""Each record against float64 NumPy: in eager mode, in nn.Graph and global over two processes; of
views, in threads and forked."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from oneflow_accel import settings
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest
from _pytest.mark import ParameterSet
from oneflow import nn

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels import not_finite
from tests.oneflow_accel.kernels.harness import (
    as_array,
    assert_same_in_threads,
    emulated_tiles,
    needs_plugin,
)
from tests.oneflow_accel.kernels.record import Case, Record
from tests.oneflow_accel.kernels.record_check import (
    GLOBAL_CASE,
    all_records,
    arrays_in,
    assert_gradients,
    assert_output,
    expected_output,
    in_float64,
    is_float,
    largest_case,
    layout_name,
    output_gradient,
    results,
    size,
    tensor_gradients,
    tensors_of,
)

pytestmark = needs_plugin

RECORDS = all_records()
# Central differences are for the references, which small inputs check as well as large ones.
MOST_ELEMENTS_FOR_DIFFERENCES = 500


def _each_case(
    keep: Callable[[Record, Case], bool] = lambda record, case: True,
) -> list[ParameterSet]:
    return [
        pytest.param(record, case, id=f"{record.name}-{case.name}")
        for record in RECORDS
        for case in record.cases
        if keep(record, case)
    ]


def _each_case_and_dtype(
    keep: Callable[[Case], bool] = lambda case: True, release: Collection[str] = ()
) -> list[ParameterSet]:
    """Those of the types in `release` are for one."""
    marks = dict.fromkeys(release, pytest.mark.release)
    return [
        pytest.param(
            record, case, dtype, id=f"{record.name}-{case.name}-{dtype}", marks=marks.get(dtype, ())
        )
        for record in RECORDS
        for case in record.cases
        if keep(case)
        for dtype in record.dtypes
    ]


def _first_and_largest(record: Record) -> tuple[Case, Case]:
    """Of a record's cases that an nn.Graph of oneflow 0.9.0 takes: no 0-d or empty tensors."""
    fit = [
        one for one in record.cases if all(0 not in shape and shape != () for shape in one.shapes())
    ]
    return fit[0], max(fit, key=size)


def _fits_differences(record: Record, case: Case) -> bool:
    return record.gradient is not None and 0 < size(case) <= MOST_ELEMENTS_FOR_DIFFERENCES


def test_names_are_unique() -> None:
    names = [record.name for record in RECORDS]
    assert len(set(names)) == len(names)
    for record in RECORDS:
        cases = [case.name for case in record.cases]
        assert len(set(cases)) == len(cases), record.name


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_the_plugin_has_the_operator(record: Record) -> None:
    assert set(record.operators) <= set(plugin.state().operators)


@pytest.mark.parametrize(("record", "case", "dtype"), _each_case_and_dtype())
def test_eager(record: Record, case: Case, dtype: str) -> None:
    backward = record.gradient is not None and dtype in record.gradient_dtypes
    arrays = arrays_in(case, dtype)
    tensors = tensors_of(arrays, dtype, gradient=backward)
    y = record.call(*tensors, **case.attributes)
    assert y.dtype == getattr(flow, dtype) or not y.is_floating_point()
    assert_output(record, case, arrays, as_array(y), dtype)
    if backward:
        dy = output_gradient(tuple(y.shape), dtype)
        y.backward(flow.tensor(dy).to(y.dtype))
        assert_gradients(record, case, arrays, dy, tensor_gradients(tensors), dtype)


def _as_view(array: np.ndarray, gradient: bool) -> flow.Tensor:
    """Every other element of a larger tensor, with its axes the other way round."""
    every_other = tuple(slice(None, None, 2) for _ in array.shape)
    larger = np.full([2 * size for size in reversed(array.shape)], 1, array.dtype)
    larger[every_other] = array.transpose()
    view = flow.tensor(larger)[every_other].permute(*reversed(range(array.ndim)))
    return view.requires_grad_() if gradient and is_float(array) else view


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_views(record: Record) -> None:
    for case in _first_and_largest(record):
        views = [_as_view(array, record.gradient is not None) for array in case.arrays()]
        np.testing.assert_array_equal(results(record, case, views), results(record, case))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_several_python_threads(record: Record) -> None:
    case = largest_case(record)
    assert_same_in_threads(lambda: results(record, case), calls=2)


def test_any_number_of_threads_and_a_forked_process() -> None:
    """To the last bit."""
    found: dict[str, set[str]] = {}
    for threads in ("1", "2", "3"):
        worker = ["-m", "tests.oneflow_accel.kernels.records_worker", "digests"]
        output = run_process(worker, timeout=300, env={settings.THREADS.name: threads}).stdout
        assert "end of the child" in output, output[-2000:]
        for line in output.splitlines():
            if line.startswith("digest "):
                found.setdefault(line.partition(": ")[0], set()).add(line.partition(": ")[2])
    assert len(found) == len(RECORDS)
    differ = {name.split()[1] for name, digests in found.items() if len(digests) > 1}
    # For AVX2 oneDNN's sgemm cuts long sums into one part for each thread.
    sums = {
        "batch_matmul",
        "fused_matmul_bias",
        "linear_cross_entropy",
        "linear_cross_entropy_mean",
    }
    assert differ <= (sums if plugin.state().level == "avx2" else set())


def _uses_tiles(record: Record) -> bool:
    names = ("oneflow_accel_attention", "oneflow_accel_packed_attention", "oneflow_accel_monarch")
    return "bfloat16" in record.dtypes and any(name in record.operators for name in names)


@pytest.mark.parametrize(("record", "case"), _each_case(lambda record, case: _uses_tiles(record)))
def test_tiles(record: Record, case: Case) -> None:
    """What AMX computes, on processors without it too."""
    with emulated_tiles():
        test_eager(record, case, "bfloat16")


def _expected(
    record: Record, case: Case, arrays: list[np.ndarray], dy: np.ndarray | None
) -> list[np.ndarray | None]:
    """The reference's output and, where there is a dy, its gradients."""
    with np.errstate(all="ignore"):
        results: list[np.ndarray | None] = [expected_output(record, case, arrays)]
        if dy is not None:
            assert record.gradient is not None
            results += record.gradient(
                dy.astype(np.float64), *in_float64(arrays), **case.attributes
            )
    return results


@pytest.mark.parametrize(
    ("record", "case", "dtype"),
    _each_case_and_dtype(lambda case: not_finite.fits(case.arrays()), {"float64", "bfloat16"}),
)
def test_not_finite(record: Record, case: Case, dtype: str) -> None:
    """NaN and infinity in any input come out where they do in the reference."""
    backward = record.gradient is not None and dtype in record.gradient_dtypes
    for name, planted in not_finite.planted(arrays_in(case, dtype)):
        tensors = tensors_of(planted.arrays, dtype, gradient=backward)
        y = record.call(*tensors, **case.attributes)
        actual = [as_array(y)]
        dy = None
        if backward:
            dy = output_gradient(tuple(y.shape), dtype)
            y.backward(flow.tensor(dy).to(y.dtype))
            actual += tensor_gradients(tensors)

        def compute(arrays: list[np.ndarray], dy: Any = dy) -> list[np.ndarray | None]:
            return _expected(record, case, arrays, dy)

        expected = compute(planted.arrays)
        reached = not_finite.influenced(compute, planted)
        for i, (mine, reference, mask) in enumerate(zip(actual, expected, reached, strict=True)):
            if reference is not None and mine is not None:
                not_finite.assert_same_classes(
                    mine,
                    reference,
                    mask,
                    planted,
                    record.not_finite,
                    dtype=dtype,
                    reduced=case.reduced,
                    what=f"{name}: {'output' if i == 0 else f'gradient of input {i - 1}'}",
                )


class _Call(nn.Module):
    """A record's call on inputs that are its parameters (floating-point) and buffers (others)."""

    def __init__(self, record: Record, case: Case) -> None:
        super().__init__()
        self.record, self.case = record, case
        self.arrays = case.arrays()
        for i, array in enumerate(self.arrays):
            if is_float(array) and record.gradient is not None:
                self.register_parameter(f"input{i}", nn.Parameter(flow.tensor(array)))
            else:
                self.register_buffer(f"input{i}", flow.tensor(array))

    def forward(self) -> flow.Tensor:
        inputs = [getattr(self, f"input{i}") for i in range(len(self.arrays))]
        # An operator's result, as an operator meets it in a model, and not a variable.
        inputs = [x * 1.0 if is_float(a) else x for x, a in zip(inputs, self.arrays, strict=True)]
        return self.record.call(*inputs, **self.case.attributes)


@pytest.mark.parametrize("largest", [pytest.param(0, marks=pytest.mark.release), 1])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_graph(record: Record, largest: int) -> None:
    """To the last bit as eager."""
    case = _first_and_largest(record)[largest]
    module, eager = check_graph(record, case), _Call(record, case)
    y = eager()
    np.testing.assert_array_equal(module.y, y.numpy())
    if record.gradient is not None:
        (y * flow.tensor(output_gradient(tuple(y.shape)))).sum().backward()
        flow.optim.SGD(eager.parameters(), lr=1.0).step()
        for one, other in zip(module.parameters(), eager.parameters(), strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def check_graph(record: Record, case: Case) -> _Call:
    """The module after a step of SGD in an nn.Graph, with its output `y` then."""
    arrays = case.arrays()
    expected = expected_output(record, case, arrays)
    module = _Call(record, case)
    dy = output_gradient(expected.shape)
    weight = flow.tensor(dy)
    parameters = dict(module.named_parameters())
    optimizer = flow.optim.SGD(module.parameters(), lr=1.0) if parameters else None

    class Step(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            if optimizer is not None:
                self.add_optimizer(optimizer)

        def build(self) -> flow.Tensor:
            y = self.module()
            if optimizer is not None:
                (y * weight).sum().backward()
            return y

    y = Step()()
    module.y = y.numpy()
    assert_output(record, case, arrays, module.y, "float32")
    if parameters:
        # x - 1.0 * dx is what the step leaves in the parameter.
        steps = [parameters.get(f"input{i}") for i in range(len(arrays))]
        actual = [
            None if step is None else array.astype(np.float64) - step.numpy()
            for array, step in zip(arrays, steps, strict=True)
        ]
        assert_gradients(record, case, arrays, dy, actual, "float32")
    return module


@pytest.mark.parametrize(("record", "case"), _each_case(_fits_differences))
def test_the_reference_has_its_own_gradient(record: Record, case: Case) -> None:
    """What kernels are held against: central differences along a random direction, at float64."""
    arrays = in_float64(case.arrays())
    expected = record.reference(*arrays, **case.attributes)
    dy = output_gradient(np.shape(expected)).astype(np.float64)
    gradients = record.gradient(dy, *arrays, **case.attributes)
    generator = np.random.default_rng(11)
    step = 1e-6
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        direction = generator.standard_normal(arrays[i].shape)
        ahead, behind = list(arrays), list(arrays)
        ahead[i] = arrays[i] + step * direction
        behind[i] = arrays[i] - step * direction
        difference = np.asarray(record.reference(*ahead, **case.attributes)) - np.asarray(
            record.reference(*behind, **case.attributes)
        )
        along = np.sum(difference * dy) / (2 * step)
        scale = 1.0 + np.sqrt(np.sum(np.square(gradient)))
        assert abs(along - np.sum(gradient * direction)) < 1e-6 * scale * max(1, arrays[i].ndim)


@pytest.fixture(scope="module")
def global_results() -> dict[str, str]:
    process = run_distributed(["-m", "tests.oneflow_accel.kernels.global_records"], 2)
    results = {"": process.stdout[-2000:]}
    for line in process.stdout.splitlines():
        if line.startswith("record "):
            results.update(json.loads(line.removeprefix("record ")))
    return results


@pytest.mark.parametrize(
    "key",
    [
        f"{record.name}-{layout_name(layout)}"
        for record in RECORDS
        for layout in record.layouts
        if any(case.name == GLOBAL_CASE for case in record.cases)
    ],
)
def test_global(key: str, global_results: dict[str, str]) -> None:
    assert key in global_results, f"the processes ended before: {global_results['']}"
    assert global_results[key] == "equal"


def test_every_layout_has_its_case() -> None:
    for record in RECORDS:
        has = any(case.name == GLOBAL_CASE for case in record.cases)
        assert has or not record.layouts, record.name
