"""Decides whether a patch is needed, from the device that this process uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oneflow_accel.errors import DeviceUnavailableError
from oneflow_accel.patching.header import Condition


class Device(Protocol):
    """The part of a `Backend` that a condition asks."""

    @property
    def name(self) -> str:
        """The device's name."""

    def supports(self, feature: str, /) -> object:
        """True-like where the device has the feature."""


DeviceFinder = Callable[[], Device | None]


def holds(condition: Condition, find_device: DeviceFinder) -> bool:
    """Whether a patch with this condition is needed.

    Args:
        condition: the patch's `Applies-When`.
        find_device: gives the device, or None where there is none; only called if it matters.
    """
    if condition.kind == "always":
        return True
    device = find_device()
    if device is None:
        return False
    if condition.kind == "device":
        return device.name == condition.value
    return bool(device.supports(condition.value)) == (condition.kind == "feature")


def expected_device() -> Device | None:
    """The device that will be selected unless the caller asks for another one: what
    ONEFLOW_ACCEL_DEVICE names, else the first usable one.

    Runs while oneflow is being imported (oneflow itself imports the modules that its patches
    edit), so it calls nothing in oneflow that needs the import to be complete.

    Returns:
        None where that device is not usable: `select_device` says so, with the reason.
    """
    # Imports oneflow, which must not happen before the patches' finder is installed.
    from oneflow_accel.backends import registry

    try:
        return registry.resolve().backend
    except DeviceUnavailableError:
        return None
