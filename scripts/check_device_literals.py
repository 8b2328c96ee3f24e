"""Lint: a device's name is spelled in oneflow_accel/backends and nowhere else.

Looks at every Python file that git knows or could add, and flags
  - the strings "cuda" and "mlu", alone or with an index ("cuda:0", f"cuda:{rank}"),
  - calls of a method `.cuda(`, and
  - `oneflow.cuda` and `flow.cuda`, as an attribute or in an import.
The rest of the code asks the backend. A line that must spell one has a comment
`# device-literal: reason`; these are counted and printed.

Exit code 1 if something is flagged, with file:line for each.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracked import ROOT, listed_files

# The device package itself, tests, this file, and scripts that run PyTorch to compare with.
EXCLUDED = (
    "oneflow_accel/backends/",
    "tests/",
    "scripts/check_device_literals.py",
    "benchmarks/peers/",
)
_NAME = re.compile(r"(cuda|mlu)(:\d*)?")
_ESCAPE = re.compile(r"#\s*device-literal:\s*(\S.*)")
_MODULES = ("oneflow", "flow")


@dataclass(frozen=True)
class Finding:
    """One place that spells a device's name; `escape` is the reason given there, if any."""

    path: str
    line: int
    what: str
    escape: str | None


def check_source(path: str, source: str) -> list[Finding]:
    """Findings in one file's text, in line order; SyntaxError where it is not Python."""
    escapes = _escapes(source)
    tree = ast.parse(source, filename=path)
    found = sorted({(node_line, what) for node_line, what in _spelled(tree)})
    return [Finding(path, line, what, escapes.get(line)) for line, what in found]


def _spelled(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _NAME.fullmatch(node.value):
                yield node.lineno, f'the string "{node.value}"'
        elif isinstance(node, ast.Attribute) and node.attr == "cuda":
            if isinstance(node.value, ast.Name) and node.value.id in _MODULES:
                yield node.lineno, f"{node.value.id}.cuda"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "cuda":
                yield node.lineno, ".cuda("
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[:2] == ["oneflow", "cuda"]:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(f"{name}.".startswith("oneflow.cuda.") for name in names):
                yield node.lineno, f"from {node.module} import"


def _escapes(source: str) -> dict[int, str]:
    """Line -> the reason in its escape comment."""
    reasons = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = _ESCAPE.match(token.string) if token.type == tokenize.COMMENT else None
        if match:
            reasons[token.start[0]] = match.group(1)
    return reasons


def python_files(root: Path) -> list[str]:
    """Paths of the Python files under git to check, sorted."""
    paths = listed_files(root)
    return [path for path in paths if path.endswith(".py") and not path.startswith(EXCLUDED)]


def main(root: Path = ROOT) -> int:
    findings = [
        finding
        for path in python_files(root)
        for finding in check_source(path, (root / path).read_text(encoding="utf-8"))
    ]
    flagged = [finding for finding in findings if finding.escape is None]
    for finding in flagged:
        print(f"{finding.path}:{finding.line}: {finding.what}: ask the backend instead")
    escaped = [finding for finding in findings if finding.escape is not None]
    print(f"device literals: {len(flagged)} flagged, {len(escaped)} allowed by a comment")
    for finding in escaped:
        print(f"  {finding.path}:{finding.line}: {finding.what} ({finding.escape})")
    return 1 if flagged else 0


if __name__ == "__main__":
    sys.exit(main())
