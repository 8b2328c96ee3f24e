"""Every backend has the interface of the base class: the same functions, called the same way."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import Path

from oneflow_accel.backends import Backend, candidates

import pytest

from tests.oneflow_accel.third_party import TINY, install

# The names that torch.accelerator (PyTorch 2.9) has for what this interface has too.
TORCH_ACCELERATOR_NAMES = {
    "is_available",
    "device_count",
    "synchronize",
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "empty_cache",
}


def public_functions(cls: type) -> dict[str, object]:
    return {
        name: member
        for name, member in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    }


@pytest.fixture(params=["mlu", "cuda", "cpu", "tiny"])
def backend_class(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_registry: None,
) -> type[Backend]:
    # That of the test before has no source any more.
    monkeypatch.delitem(sys.modules, "tiny_signatures", raising=False)
    monkeypatch.syspath_prepend(str(install(tmp_path, "tiny_signatures", TINY)))
    backend = candidates()[request.param].backend
    assert backend is not None
    return type(backend)


def test_list_above_is_every_backend_found(fresh_registry: None) -> None:
    assert {"mlu", "cuda", "cpu"} <= set(candidates())


def test_at_most_twenty_functions() -> None:
    assert 10 < len(public_functions(Backend)) <= 20


def test_names_are_those_of_torch_accelerator() -> None:
    assert set(public_functions(Backend)) >= TORCH_ACCELERATOR_NAMES


def test_same_functions_as_base(backend_class: type[Backend]) -> None:
    assert set(public_functions(backend_class)) == set(public_functions(Backend))


def test_same_signatures_as_base(backend_class: type[Backend]) -> None:
    for name, function in public_functions(Backend).items():
        expected = inspect.signature(function)  # type: ignore[arg-type]
        assert inspect.signature(getattr(backend_class, name)) == expected, name


def test_attributes_are_filled_in(backend_class: type[Backend]) -> None:
    assert backend_class.name
    assert backend_class.collective_backend


def test_no_function_only_returns_none(backend_class: type[Backend]) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(backend_class)))
    empty = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and all(map(_does_nothing, node.body))
    ]
    assert empty == []


def test_a_body_that_only_returns_none_is_noticed() -> None:
    body = ast.parse('def f():\n    """Text."""\n    return None').body[0]
    assert isinstance(body, ast.FunctionDef)
    assert all(map(_does_nothing, body.body))


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Return):
        return statement.value is None or (
            isinstance(statement.value, ast.Constant) and statement.value.value is None
        )
    return isinstance(statement, ast.Pass)
