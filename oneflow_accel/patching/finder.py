"""The import hook: gives modules that patches edit their patched source while they are imported,
and those that are imported already the patched code of their functions."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.conditions import DeviceFinder
from oneflow_accel.patching.hunks import join
from oneflow_accel.patching.linemap import compile_patched
from oneflow_accel.patching.loaded import Leftovers, LoadedModule, Refusal
from oneflow_accel.patching.package import PatchedPackage, PatchedSource
from oneflow_accel.patching.packages import find_spec, module_name
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

    def apply_to_imported(self) -> list[str]:
        """Patch the modules that were imported before this finder was installed.

        Returns:
            What that could not make up for, a sentence without an end for each; for users.

        Raises:
            PatchError: a patch does not fit what is installed.
        """
        late: list[str] = []
        for name in sorted(self._names & sys.modules.keys()):
            try:
                # Where another thread is importing it, this waits.
                importlib.import_module(name)
                if name not in self._modules:
                    self._load(name)
                if name in self.packages:
                    late += self._apply_to(self.packages[name])
            except PatchError as error:
                raise self._failure(name, error) from error
        return late

    def _apply_to(self, package: PatchedPackage) -> list[str]:
        modules: dict[str, LoadedModule] = {}

        def each(paths: Iterable[str], step: Callable[[str], object]) -> None:
            """Call step with the path of each file, and leave out what it refuses."""
            for path in list(paths):
                try:
                    step(path)
                except Refusal as refusal:
                    package.refuse(path, f"{module_name(path)} is imported already: {refusal}")
            for path in [path for path in modules if not package.needed(path, self._find_device)]:
                del modules[path]

        def compare(path: str) -> None:
            module = sys.modules.get(module_name(path))
            loader = getattr(getattr(module, "__spec__", None), "loader", None)
            if module is not None and not isinstance(loader, PatchedLoader):
                source = package.missing(path, self._find_device)
                if source is not None and not package.has_applied(source, module.__name__):
                    modules[path] = LoadedModule(module, source)

        each(package.modules().values(), compare)
        # What one module imports another may have to get first.
        for _ in range(len(modules)):
            each(modules, lambda path: modules[path].add())
        each(modules, lambda path: modules[path].prepare())
        leftovers = Leftovers()
        for module in modules.values():
            leftovers += module.apply()
            package.note_applied(module.source, module.module.__name__)
        found = leftovers.found()
        late = [
            f"patch {package.name}-{package.version}/{patch} is left out, as {reason}"
            for patch, reason in package.refused.items()
        ]
        if found:
            made = ", ".join(f"{number} {kind}" for kind, number in list(found.items())[:5])
            more = " and more" if len(found) > 5 else ""
            late.insert(0, f"what is made already stays as {package.name} made it ({made}{more})")
        return late

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
        self._package.note_applied(self._source, module.__name__)
        logger.info("patched %s in memory: %s", module.__name__, self._source.label)
