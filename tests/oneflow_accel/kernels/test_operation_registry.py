"""Operation entries: which implementation is chosen, and what is said when none fits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from oneflow_accel import settings
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import registry

import numpy as np
import oneflow as flow
import pytest

X = np.array([[1.0, -2.0], [3.0, 4.0]])
ADD = "scale_add"


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_operations", {})
    monkeypatch.delenv(settings.STRICT.name, raising=False)


@pytest.fixture
def calls() -> list[str]:
    """The functions that have run, in order."""
    return []


def recorded(name: str, calls: list[str]) -> Callable[..., flow.Tensor]:
    def function(x: flow.Tensor, scale: float = 2.0) -> flow.Tensor:
        calls.append(name)
        return x * scale + x

    function.__name__ = name
    return function


@pytest.fixture
def operation(calls: list[str]) -> registry.Operation:
    """Two CPU implementations: `square` for square float32, then `any_shape` for 2-D float32."""
    entry = registry.register_operation(ADD, reference=recorded("plain", calls), doc="x s + x.")

    def not_square(x: flow.Tensor, scale: float = 2.0) -> list[str]:
        reasons = [] if x.shape[0] == x.shape[1] else [f"shape {tuple(x.shape)} is not square"]
        return reasons + ([] if scale > 0 else [f"scale {scale} is not positive"])

    def not_matrix(x: flow.Tensor, scale: float = 2.0) -> list[str]:
        return [] if x.dim() == 2 else [f"{x.dim()} dimensions"]

    add = registry.implementation
    add(ADD, backend="cpu", dtypes=(flow.float32,), not_supported_reasons=not_square)(
        recorded("square", calls)
    )
    add(ADD, backend="cpu", dtypes=(flow.float32,), not_supported_reasons=not_matrix)(
        recorded("any_shape", calls)
    )
    add(ADD, backend="cuda", dtypes=(flow.float16,))(recorded("half", calls))
    return entry


def test_first_that_fits_is_chosen(operation: registry.Operation, calls: list[str]) -> None:
    result = operation(flow.tensor(X, dtype=flow.float32), scale=3.0)
    np.testing.assert_array_equal(result.numpy(), X * 4)
    operation(flow.ones(2, 3))
    operation(flow.ones(2, 2), scale=-1.0)
    assert calls == ["square", "any_shape", "any_shape"]


def test_reference_for_another_dtype(operation: registry.Operation, calls: list[str]) -> None:
    result = operation(flow.tensor(X, dtype=flow.float64))
    np.testing.assert_array_equal(result.numpy(), X * 3)
    assert calls == ["plain"]


def test_global_tensors_dispatch_by_placement(
    operation: registry.Operation, calls: list[str]
) -> None:
    placement = flow.placement("cpu", [0])
    operation(flow.ones(2, 2, placement=placement, sbp=flow.sbp.broadcast))
    assert calls == ["square"]


def test_one_warning_per_operation_with_all_reasons(
    operation: registry.Operation, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="oneflow_accel"):
        for _ in range(3):
            operation(flow.ones(2, 3, dtype=flow.float64))
    (record,) = caplog.records
    text = record.getMessage()
    assert "scale_add on cpu runs on its reference" in text
    assert "square: has oneflow.float32, not oneflow.float64" in text
    assert "any_shape: has oneflow.float32, not oneflow.float64" in text


def test_strict_mode_makes_a_fall_back_an_error(
    operation: registry.Operation, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.STRICT.name, "1")
    operation(flow.ones(2, 2))
    with pytest.raises(registry.FallbackError) as caught:
        operation(flow.ones(2, 3, 4))
    assert "square: shape (2, 3, 4) is not square | any_shape: 3 dimensions" in str(caught.value)
    assert calls == ["square"]


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_device_without_implementations_is_no_fall_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: str
) -> None:
    monkeypatch.setenv(settings.STRICT.name, strict)
    entry = registry.register_operation("negate", reference=lambda x: -x, doc="-x.")
    registry.implementation("negate", backend="cuda", dtypes=(flow.float32,))(lambda x: -x)
    np.testing.assert_array_equal(entry(flow.ones(2)).numpy(), [-1.0, -1.0])
    assert not caplog.records


def test_explain_by_device(operation: registry.Operation) -> None:
    assert registry.explain(ADD, "cuda").splitlines() == [
        "scale_add: x s + x.",
        "  no: square (cpu, oneflow.float32): is for cpu",
        "  no: any_shape (cpu, oneflow.float32): is for cpu",
        "  CHOSEN: half (cuda, oneflow.float16)",
        "  not needed: reference (any device, any dtype)",
    ]


def test_explain_with_arguments(operation: registry.Operation, calls: list[str]) -> None:
    lines = registry.explain(ADD, "cpu", flow.ones(2, 3)).splitlines()
    assert lines[1] == "  no: square (cpu, oneflow.float32): shape (2, 3) is not square"
    assert lines[2] == "  CHOSEN: any_shape (cpu, oneflow.float32)"
    assert lines[-1] == "  not needed: reference (any device, any dtype)"
    lines = registry.explain(ADD, "cpu", flow.ones(2, dtype=flow.float64)).splitlines()
    assert lines[-1] == "  CHOSEN: reference (any device, any dtype)"
    assert calls == [], "explaining computes nothing"


def test_names_are_unique_and_known(operation: registry.Operation) -> None:
    with pytest.raises(ValueError, match="registered twice"):
        registry.register_operation(ADD, reference=lambda x: x, doc="")
    with pytest.raises(UserError, match=r"no operation is called 'mul'; there are: scale_add\.$"):
        registry.explain("mul", "cpu")
    with pytest.raises(UserError, match="Did you mean 'scale_add'"):
        registry.explain("scale_ad", "cpu")


def test_what_is_switched_off_is_not_chosen(
    operation: registry.Operation,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = flow.tensor(X, dtype=flow.float32)
    monkeypatch.setattr(registry, "operations", lambda: registry._operations)
    monkeypatch.setenv(settings.STRICT.name, "1")
    with registry.disabled("square"):
        operation(x)
        assert "no: square" in registry.explain(ADD, "cpu")
        with registry.disabled(ADD):
            operation(x)
    operation(x)
    monkeypatch.setenv(settings.DISABLE.name, "any_shape, square")
    operation(x)
    # No fallback that nobody asked for: strict mode is silent.
    assert calls == ["any_shape", "plain", "square", "plain"]
    assert not caplog.records


@pytest.mark.parametrize("name", ["squares", "nothing of the kind"])
def test_an_unknown_name_cannot_be_switched_off(
    operation: registry.Operation, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(registry, "operations", lambda: registry._operations)
    monkeypatch.setenv(settings.DISABLE.name, name)
    expected = f"ONEFLOW_ACCEL_DISABLE={name}: no operation or implementation is called"
    with pytest.raises(UserError, match=expected) as error:
        operation(flow.tensor(X))
    assert ("'square'?" in str(error.value)) == (name == "squares")
    with pytest.raises(UserError, match="disabled: no operation"), registry.disabled(name):
        pass
