"""Finds installed packages and their modules without importing them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath


def find_spec(
    name: str, path: Sequence[str] | None = None, *, skip: type | None = None
) -> ModuleSpec | None:
    """The spec of a module from the first finder that knows it, leaving out finders of type
    `skip`."""
    for finder in sys.meta_path:
        if skip is None or not isinstance(finder, skip):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


def installed_version(package: str) -> str | None:
    """The installed release, without a local part ("0.9.0" for "0.9.0+cu117": PEP 440 has both
    match a pin on 0.9.0), or None if the package is not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def install_folder(package: str, *, skip: type | None = None) -> Path | None:
    """The folder, such as site-packages, that holds the folder of a package, or None if Python
    finds no package of that name."""
    spec = find_spec(package, skip=skip)
    # A folder that merely has the name is a "namespace package", without a file of its own.
    return (
        None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent.parent
    )


def module_name(path: str) -> str:
    """The module in a file, from its path below site-packages."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
