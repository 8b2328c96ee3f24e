"""Lint: nothing is raised on the main process alone, as the others would wait for it: no `raise` in
an `if` that asks `is_main`, whatever else it asks. Exit code 1, with file:line, if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tracked import ROOT, listed_files


def check_source(source: str) -> list[int]:
    """Lines of what is raised so in one file's text; SyntaxError where it is not Python."""
    tests = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
    return sorted({line for test in tests if _asks(test.test) for line in _raised(test)})


def _asks(test: ast.expr) -> bool:
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test))
    return any(name.lstrip("_") == "is_main" for name in names)


def _raised(node: ast.AST) -> Iterator[int]:
    """A function that is defined there may be one for `on_rank_0`."""
    if isinstance(node, ast.Raise):
        yield node.lineno
    elif not isinstance(node, ast.FunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from _raised(child)


def main(root: Path = ROOT) -> int:
    files = (path for path in listed_files(root) if path.endswith(".py"))
    found = [(path, line) for path in files for line in check_source((root / path).read_text())]
    for path, line in found:
        print(f"{path}:{line}: raised on one process: let oneflow_accel.agree.on_rank_0 do it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
