"""The patches of this process: the import hook that applies them, and what became of each."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType

from oneflow_accel import settings
from oneflow_accel.errors import PatchError
from oneflow_accel.patching.code import LoadedModule, Refusal, compiled, made_before
from oneflow_accel.patching.package import PatchedPackage, PatchedSource, find_spec, module_name
from oneflow_accel.patching.series import Patch, join, patch_names, patch_root, series_versions

logger = logging.getLogger("oneflow_accel")


STATES = ("applied", "applied-on-disk", "not-needed", "refused", "off", "pending")


@dataclass(frozen=True)
class PatchStatus:
    """What became of a patch: one of STATES ("pending" until a module that it edits is imported),
    and why, or where it was applied."""

    name: str
    package: str
    version: str
    state: str
    reason: str


class Session(MetaPathFinder):
    """Finds modules that need a patch; all other imports pass by. The patches of a package are read
    when the package is first imported."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._installed = False
        self._names = frozenset(series_versions(root))
        # What has been read, None for a package that is not there.
        self._packages: dict[str, PatchedPackage | None] = {}
        self._failures: dict[str, PatchError] = {}

    def install(self) -> None:
        """Patch what is imported from now on; a second call does nothing."""
        if not self._installed:
            self._installed = True
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that needs a patch, else None; PatchError if that cannot be
        applied."""
        name = fullname.partition(".")[0]
        if name not in self._names:
            return None
        try:
            package = self._package(name)
            file = package.modules.get(fullname) if package is not None else None
            if package is None or file is None:
                return None
            source = package.missing(file)
        except PatchError as error:
            raise self._failure(name, error) from error
        if source is None:
            return None
        spec = find_spec(fullname, path, skip=Session)
        if spec is not None:
            kept = Path(cache_from_source(str(self._root / f"{fullname}.py")))
            spec.loader = PatchedLoader(fullname, str(package.folder / file), package, source, kept)
        return spec

    def apply_to_imported(self) -> list[str]:
        """Patch the modules that were imported before `install`; see the function of this name."""
        late: list[str] = []
        for name in sorted(self._names & sys.modules.keys()) if self._installed else ():
            try:
                # Where another thread is importing it, this waits.
                importlib.import_module(name)
                package = self._package(name)
                if package is not None:
                    late += self._apply_to(package)
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
            for path in [path for path in modules if not package.needed(path)]:
                del modules[path]

        def compare(path: str) -> None:
            module = sys.modules.get(module_name(path))
            loader = getattr(getattr(module, "__spec__", None), "loader", None)
            if module is not None and not isinstance(loader, PatchedLoader):
                source = package.missing(path)
                if source is not None and not package.has_applied(source, module.__name__):
                    modules[path] = LoadedModule(module, source)

        each(package.modules.values(), compare)
        # What one module imports another may have to get first.
        for _ in range(len(modules)):
            each(modules, lambda path: modules[path].add())
        each(modules, lambda path: modules[path].prepare())
        makers: list[CodeType | type] = []
        for module in modules.values():
            makers += module.apply()
            package.note_applied(module.source, module.module.__name__)
        found = made_before(makers)
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
        self._failures[name] = error
        return PatchError(f"{error}. To run without patches, set ONEFLOW_ACCEL_PATCHES=off")

    def _package(self, name: str) -> PatchedPackage | None:
        if name not in self._packages:
            self._packages[name] = PatchedPackage.load(self._root, name, skip=Session)
        return self._packages[name]

    def status(self) -> list[PatchStatus]:
        """Every patch for what is installed, in the order of the series."""
        return [one for name in series_versions(self._root) for one in self._package_status(name)]

    def _package_status(self, name: str) -> list[PatchStatus]:
        try:
            if name in self._failures:
                raise self._failures[name]
            package = self._packages.get(name)
            package = package or PatchedPackage.load(self._root, name, skip=Session)
            if package is None:
                return self._all(name, "not-needed", f"{name} is not installed")
            return [
                PatchStatus(patch.name, name, package.version, *self._patch_state(package, patch))
                for patch in package.patches
            ]
        except PatchError as error:
            return self._all(name, "refused", str(error))

    def _patch_state(self, package: PatchedPackage, patch: Patch) -> tuple[str, str]:
        modules = package.loaded.get(patch.name)
        if patch.name in package.refused:
            return "refused", package.refused[patch.name]
        if modules:
            return "applied", f"in memory: {', '.join(modules)}"
        if package.on_disk(patch):
            return "applied-on-disk", str(package.folder)
        if not self._installed:
            return "off", f"{settings.PATCHES.name}=off"
        return "pending", f"applies when {package.name} imports what it edits"

    def _all(self, name: str, state: str, reason: str) -> list[PatchStatus]:
        return [
            PatchStatus(patch, name, version, state, reason)
            for version in series_versions(self._root)[name]
            for patch in patch_names(self._root, name, version)
        ]


class PatchedLoader(SourceFileLoader):
    """Loads a module from patched source, or from the bytecode that it keeps beside the patches."""

    def __init__(
        self, fullname: str, path: str, package: PatchedPackage, source: PatchedSource, kept: Path
    ) -> None:
        super().__init__(fullname, path)
        self._package = package
        self._source = source
        self._kept = kept

    def get_source(self, fullname: str) -> str:
        return join(self._source.patched)

    def get_code(self, fullname: str) -> CodeType:
        """The patched code, under the name of the original file."""
        return compiled(self._source, self.path, self._kept)

    def exec_module(self, module: ModuleType) -> None:
        """Run the patched code, then note that its patches are applied."""
        super().exec_module(module)
        self._package.note_applied(self._source, module.__name__)
        logger.info("patched %s in memory: %s", module.__name__, self._source.label)


_session: Session | None = None


def install(root: Path | None = None) -> None:
    """Patch packages as they are imported from now on, unless ONEFLOW_ACCEL_PATCHES=off; imports
    none of them.

    While a module is imported, PatchError says which patch does not fit what is installed and what
    to do. `root` is the folder of all patches, None for the one of this installation.
    """
    global _session
    if _session is None:
        session = Session(root or patch_root())
        if settings.PATCHES.get() != "off":
            session.install()
        _session = session


def apply_to_imported() -> list[str]:
    """Patch what was imported before `install` was called: functions get their patched code.

    Patched code imports oneflow_accel, which must be complete by then. Returns what that could not
    make up for, a sentence without an end for each: objects that were made before, and patches that
    change more than functions.

    Raises:
        PatchError: a patch does not fit what is installed.
    """
    return _session.apply_to_imported() if _session is not None else []


def status() -> list[PatchStatus]:
    """What became of each patch in this process."""
    return (_session or Session(patch_root())).status()
