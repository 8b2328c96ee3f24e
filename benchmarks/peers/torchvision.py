"""A torchvision for timm to import: PyTorch's CPU build has none, and timm's ViT does not use it.

timm imports names of torchvision at the top of many modules. Each of them becomes an empty class
here, which is enough to define timm's own classes, and which fails where one is really used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _EmptyClass(type):
    """An enumeration's members and other class attributes become their names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _EmptyClass(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """Make `import torchvision` and everything below it give empty modules."""
    sys.meta_path.append(_Finder())
