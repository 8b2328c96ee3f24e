"""Patches installed packages while they are imported; nothing in site-packages is touched.

`import oneflow_accel` calls `install` before it imports oneflow. The patches are the files of
`patches/<package>-<version>/`, in the order of its `series`.
"""

from oneflow_accel.patching import runtime
from oneflow_accel.patching.header import Condition
from oneflow_accel.patching.series import patch_root
from oneflow_accel.patching.session import (
    PatchStatus,
    device_selected,
    find_device,
    install,
    status,
)

__all__ = [
    "Condition",
    "PatchStatus",
    "device_selected",
    "find_device",
    "install",
    "patch_root",
    "runtime",
    "status",
]
