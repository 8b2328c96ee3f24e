"""One file per kind of device; nothing outside this package spells a device's name."""

from oneflow_accel.backends.base import FEATURES, Backend, DeviceProperties, Support
from oneflow_accel.backends.registry import (
    Candidate,
    Selection,
    available_backends,
    candidates,
    current_backend,
    delegate_of,
    kernels_of,
    resolve,
    select_device,
)

__all__ = [
    "FEATURES",
    "Backend",
    "Candidate",
    "DeviceProperties",
    "Selection",
    "Support",
    "available_backends",
    "candidates",
    "current_backend",
    "delegate_of",
    "kernels_of",
    "resolve",
    "select_device",
]
