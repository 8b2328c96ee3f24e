"""The order of ARCHITECTURE.md: an import points to a lower floor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

FLOORS = {
    "oneflow_accel": 1,
    "flow_train": 2,
    "monarch_flow": 3,
    "resnet50_imagenet": 4,
    "vit_10b": 4,
    "libai_projects": 4,
}


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and package of each import, those inside functions and for types included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            yield node.lineno, name.partition(".")[0]


@pytest.mark.parametrize("package", FLOORS)
def test_imports_point_to_lower_floors(package: str) -> None:
    files = sorted((REPOSITORY / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {other}"
        for path in files
        for line, other in _imported(path)
        if other != package and FLOORS.get(other, 0) >= FLOORS[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_architecture_names_each_package() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    for package in FLOORS:
        assert f"{package}/" in text
