"""Compiles patched source so that tracebacks stay true to the file on disk.

The code keeps the name of the file, and a line that the file has keeps its number. A line that a
patch added is numbered past the end of the file, and `linecache` is told its text. Editors,
debuggers and Python's own top-level traceback (which reads the file on disk) thus never show a
wrong line, and `traceback` shows patched lines too.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from types import CodeType

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.hunks import SourceLine, join


def parse(lines: Sequence[SourceLine], *, label: str, path: str) -> ast.Module:
    """The syntax tree of patched source, numbered as patched.

    Args:
        lines: the source after patching.
        label: names the patches in errors.
        path: names the file in errors.

    Raises:
        PatchError: it is not valid Python.
    """
    try:
        return ast.parse(join(lines), path)
    except SyntaxError as error:
        raise PatchError(
            f"patch {label}: {path} is not valid Python after it: {error.msg}, "
            f"{(error.text or '').strip()!r}"
        ) from error


def compile_patched(
    original: Sequence[SourceLine], patched: Sequence[SourceLine], *, label: str, filename: str
) -> CodeType:
    """Compile patched source under the name of the original file.

    Args:
        original: the file before patching.
        patched: the file after patching.
        label: names the patches in errors.
        filename: path of the file.

    Raises:
        PatchError: the patched source is not valid Python.
    """
    tree = parse_numbered(original, patched, label=label, filename=filename)
    code: CodeType = compile(tree, filename, "exec", dont_inherit=True)
    return code


def parse_numbered(
    original: Sequence[SourceLine], patched: Sequence[SourceLine], *, label: str, filename: str
) -> ast.Module:
    """The syntax tree of patched source, numbered as `compile_patched` says; arguments as there."""
    tree = parse(patched, label=label, path=filename)
    # A statement at column 0, so that `inspect` does not take what follows for the rest of the last
    # function of the file.
    separator = f'"added by {label}:"\n'
    added = [separator, *(line.text for line in patched if line.number is None)]
    next_number = iter(range(len(original) + 2, len(original) + len(added) + 1))
    numbers = [line.number or next(next_number) for line in patched]
    for node in ast.walk(tree):
        for attribute in ("lineno", "end_lineno"):
            number = getattr(node, attribute, None)
            if number is not None:
                setattr(node, attribute, numbers[number - 1])
    texts = [line.text for line in original] + added
    # No modification time: linecache then keeps the entry whatever the file on disk is.
    linecache.cache[filename] = (sum(map(len, texts)), None, texts, filename)
    return tree
