"""Patches installed packages in memory; nothing in site-packages is touched.

`import oneflow_accel` calls `install`, after which modules are patched while they are imported, and
then `apply_to_imported` for those that were there before. The patches are the files of
`patches/<package>-<version>/`, in the order of its `series`.
"""

from oneflow_accel.patching import runtime
from oneflow_accel.patching.session import apply_to_imported, install, status

__all__ = ["apply_to_imported", "install", "runtime", "status"]
