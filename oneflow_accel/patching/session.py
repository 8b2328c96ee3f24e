"""The patches of this process: installs the import hook, tells what became of each patch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from oneflow_accel.errors import PatchError, UserError
from oneflow_accel.patching.conditions import Device, DeviceFinder, expected_device, holds
from oneflow_accel.patching.finder import PatchFinder
from oneflow_accel.patching.package import PatchedPackage
from oneflow_accel.patching.series import Patch, patch_names, patch_root, series_versions

PATCHES_VARIABLE = "ONEFLOW_ACCEL_PATCHES"
STATES = ("applied", "applied-on-disk", "not-needed", "refused", "off", "pending")


@dataclass(frozen=True)
class PatchStatus:
    """What became of a patch.

    Attributes:
        name: file name of the patch.
        package: that it is for.
        version: of the package that it is for.
        state: one of STATES; "pending" until a module that it edits is imported.
        reason: why it is in that state, or where it was applied.
    """

    name: str
    package: str
    version: str
    state: str
    reason: str


class Session:
    """Patches packages as they are imported.

    Args:
        root: the folder of all patches.
        find_device: gives the device that conditions ask about until one is selected.
    """

    def __init__(self, root: Path, find_device: DeviceFinder) -> None:
        self._root = root
        self._expected = find_device
        self._selected: Device | None = None
        self._finder: PatchFinder | None = None

    def install(self) -> None:
        """Patch what is imported from now on; a second call does nothing."""
        if self._finder is None:
            self._finder = PatchFinder(self._root, self.find_device)
            sys.meta_path.insert(0, self._finder)

    def apply_to_imported(self) -> list[str]:
        """Patch what was imported before; see the function of this name."""
        return self._finder.apply_to_imported() if self._finder is not None else []

    def find_device(self) -> Device | None:
        """The selected device, or before that the expected one."""
        return self._selected or self._expected()

    def device_selected(self, device: Device) -> None:
        """Take note of the device that this process uses.

        Raises:
            PatchError: modules were imported with the patches for another device.
        """
        for package in self._finder.packages.values() if self._finder else ():
            for patch in package.patches:
                condition = patch.header.applies_when
                decided = package.decisions.get(condition)
                if decided is None or decided == holds(condition, lambda: device):
                    continue
                if not decided and package.on_disk(patch):
                    continue
                raise PatchError(
                    f"patch {patch.label} was {'applied' if decided else 'left out'} when "
                    f"{package.name} was imported, because '{device.name}' was not the expected "
                    f"device. Set ONEFLOW_ACCEL_DEVICE={device.name} before oneflow_accel is "
                    "imported"
                )
        self._selected = device

    def status(self) -> list[PatchStatus]:
        """Every patch for what is installed, in the order of the series."""
        result = []
        for name in series_versions(self._root):
            result += self._package_status(name)
        return result

    def _package_status(self, name: str) -> list[PatchStatus]:
        finder = self._finder
        if finder is not None and name in finder.failures:
            return self._all(name, "refused", str(finder.failures[name]))
        try:
            package = finder.packages.get(name) if finder is not None else None
            package = package or PatchedPackage.load(self._root, name, skip=PatchFinder)
            if package is None:
                return self._all(name, "not-needed", f"{name} is not installed")
            return [
                PatchStatus(patch.name, name, package.version, *self._patch_state(package, patch))
                for patch in package.patches
            ]
        except PatchError as error:
            return self._all(name, "refused", str(error))

    def _patch_state(self, package: PatchedPackage, patch: Patch) -> tuple[str, str]:
        decided = package.decisions.get(patch.header.applies_when)
        modules = package.loaded.get(patch.name)
        if patch.name in package.refused:
            return "refused", package.refused[patch.name]
        if modules:
            return "applied", f"in memory: {', '.join(modules)}"
        if package.on_disk(patch):
            unused = " (not needed on this device)" if decided is False else ""
            return "applied-on-disk", f"{package.folder}{unused}"
        if self._finder is None:
            return "off", f"{PATCHES_VARIABLE}=off"
        if decided is False:
            return "not-needed", f"applies when {patch.header.applies_when}"
        return "pending", f"applies when {package.name} imports what it edits"

    def _all(self, name: str, state: str, reason: str) -> list[PatchStatus]:
        return [
            PatchStatus(patch, name, version, state, reason)
            for version in series_versions(self._root)[name]
            for patch in patch_names(self._root, name, version)
        ]


_session: Session | None = None


def switched_off() -> bool:
    """Whether ONEFLOW_ACCEL_PATCHES=off is set.

    Raises:
        UserError: the variable is neither "on" nor "off".
    """
    switch = os.environ.get(PATCHES_VARIABLE, "on")
    if switch not in ("on", "off"):
        raise UserError(f"{PATCHES_VARIABLE}={switch!r} is neither 'on' nor 'off'")
    return switch == "off"


def install(find_device: DeviceFinder = expected_device, root: Path | None = None) -> None:
    """Patch packages as they are imported from now on, unless ONEFLOW_ACCEL_PATCHES=off.

    It imports none of them.

    Args:
        find_device: gives the device that conditions ask about until `device_selected` is called.
        root: the folder of all patches; None means the one of this installation.

    Raises:
        PatchError: later, while a module is imported: a patch does not fit what is installed. Names
            the patch and what to do.
    """
    global _session
    if _session is None:
        session = Session(root or patch_root(), find_device)
        # Another value is for `device_selected` to refuse, where a command can print the sentence.
        if os.environ.get(PATCHES_VARIABLE) != "off":
            session.install()
        _session = session


def apply_to_imported() -> list[str]:
    """Patch what was imported before `install` was called: functions get their patched code.

    Patched code imports oneflow_accel, which must be complete by then.

    Returns:
        What that could not make up for, a sentence without an end for each: objects that were made
        before, and patches that change more than functions.

    Raises:
        PatchError: a patch does not fit what is installed. Names the patch and what to do.
    """
    return _session.apply_to_imported() if _session is not None else []


def device_selected(device: Device) -> None:
    """Tell which device this process uses; `select_device` calls it.

    Raises:
        PatchError: patches were decided for another device while modules were imported.
        UserError: ONEFLOW_ACCEL_PATCHES is neither "on" nor "off".
    """
    switched_off()
    if _session is not None:
        _session.device_selected(device)


def status() -> list[PatchStatus]:
    """What became of each patch in this process."""
    return (_session or Session(patch_root(), expected_device)).status()


def find_device() -> Device | None:
    """The device that conditions ask about now."""
    return _session.find_device() if _session is not None else expected_device()
