"""The import hook: gives modules that patches edit their patched source while they are imported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.conditions import DeviceFinder
from oneflow_accel.patching.hunks import join
from oneflow_accel.patching.linemap import compile_patched
from oneflow_accel.patching.package import PatchedPackage, PatchedSource
from oneflow_accel.patching.packages import find_spec
from oneflow_accel.patching.series import series_versions

logger = logging.getLogger("oneflow_accel")


class PatchFinder(MetaPathFinder):
    """Finds modules that need a patch; all other imports pass by.

    The patches of a package are read when the package is first imported, and their conditions are
    decided when a module that they edit is.

    Args:
        root: the folder of all patches.
        find_device: gives the device that conditions ask about.
    """

    def __init__(self, root: Path, find_device: DeviceFinder) -> None:
        self._root = root
        self._find_device = find_device
        self._names = frozenset(series_versions(root))
        self._modules: dict[str, dict[str, str]] = {}
        self.packages: dict[str, PatchedPackage] = {}
        self.failures: dict[str, PatchError] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that needs a patch, else None.

        Raises:
            PatchError: it needs one that cannot be applied.
        """
        name = fullname.partition(".")[0]
        if name not in self._names:
            return None
        try:
            if name not in self._modules:
                self._load(name)
            file = self._modules[name].get(fullname)
            if file is None:
                return None
            package = self.packages[name]
            source = package.missing(file, self._find_device)
        except PatchError as error:
            raise self._failure(name, error) from error
        if source is None:
            return None
        spec = find_spec(fullname, path, skip=PatchFinder)
        if spec is not None:
            spec.loader = PatchedLoader(fullname, str(package.folder / file), package, source)
        return spec

    def refuse_imported(self) -> None:
        """Check the packages that were imported before this finder was installed.

        Raises:
            PatchError: a module that needs a patch is already imported.
        """
        for name in sorted(self._names & sys.modules.keys()):
            try:
                self._load(name)
                for module, file in self._modules[name].items():
                    if module in sys.modules:
                        source = self.packages[name].missing(file, self._find_device)
                        if source is not None:
                            raise _already_imported(name, module, source)
            except PatchError as error:
                raise self._failure(name, error) from error

    def _failure(self, name: str, error: PatchError) -> PatchError:
        self.failures[name] = error
        return PatchError(f"{error}. To run without patches, set ONEFLOW_ACCEL_PATCHES=off")

    def _load(self, name: str) -> None:
        package = PatchedPackage.load(self._root, name, skip=PatchFinder)
        if package is None:
            self._modules[name] = {}
            return
        self.packages[name] = package
        self._modules[name] = package.modules()


class PatchedLoader(SourceFileLoader):
    """Loads a module from patched source; reads and writes no bytecode cache."""

    def __init__(
        self, fullname: str, path: str, package: PatchedPackage, source: PatchedSource
    ) -> None:
        super().__init__(fullname, path)
        self._package = package
        self._source = source

    def get_source(self, fullname: str) -> str:
        """The patched source."""
        return join(self._source.patched)

    def get_code(self, fullname: str) -> CodeType:
        """The patched code, under the name of the original file."""
        source = self._source
        return compile_patched(
            source.original, source.patched, label=source.label, filename=self.path
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the patched code, then note that its patches are applied."""
        super().exec_module(module)
        for patch in self._source.patches:
            modules = self._package.loaded.setdefault(patch.name, [])
            if module.__name__ not in modules:
                modules.append(module.__name__)
        logger.info("patched %s in memory: %s", module.__name__, self._source.label)


def _already_imported(name: str, module: str, source: PatchedSource) -> PatchError:
    return PatchError(
        f"patch {source.label} cannot be applied: {module} is already imported. Import "
        f"oneflow_accel before {name}; or put the patches on disk, after which the order is free: "
        "ONEFLOW_ACCEL_PATCHES=off python -m oneflow_accel patch --apply"
    )
