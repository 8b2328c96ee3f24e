"""The device layer: picks device, kernels and collectives for everything in this code base.

Importing it is all that a program needs, before or after oneflow: patches to oneflow are applied,
the CPU kernels are registered, and OneFlow is told how to run them. Before is better, as OneFlow
keeps to what it has begun with: operations that have run keep their kernels, and modules that were
built what they were built with. One warning says so where that is the case.
"""

# ruff: noqa: E402 - the order below is what this module is for.

import gc
import logging
import sys
from contextlib import suppress

from oneflow_accel import (
    allocator,
    command,
    import_noise,
    launched,
    patching,
    rendezvous,
    settings,
)
from oneflow_accel.errors import DeviceUnavailableError

if launched.launched():
    launched.end_with_launcher()
with command.said_at_import():
    settings.check()
patching.install()
# Where oneflow is there already, the processes have met and its messages are out.
if "oneflow" not in sys.modules:
    allocator.serve_new()
    rendezvous.number_on_this_machine()
    rendezvous.wait_for_rank_zero()

# All that is made stays: to look for garbage meanwhile takes 0.05 s.
_collects = gc.isenabled()
gc.disable()
try:
    with command.said_at_import(), import_noise.left_out():
        import oneflow  # noqa: F401
finally:
    if _collects:
        gc.enable()

from oneflow_accel.backends import (
    Backend,
    available_backends,
    current_backend,
    registry,
    select_device,
)
from oneflow_accel.kernels import plugin

command.give_back_interrupt()

_late: list[str] = []
# Raised again by select_device(), unless the program asks for another device.
with command.said_at_import(), suppress(DeviceUnavailableError):
    registry.resolve().backend.prepare()
with command.said_at_import():
    if plugin.load().came_late:
        _late.append(
            "oneflow had begun, so that operations that have run keep its own kernels, and large "
            "ones share the cores with its scheduler"
        )
_late += patching.apply_to_imported()
if _late:
    logging.getLogger("oneflow_accel").warning(
        "oneflow_accel was imported late: %s. Import it at the top of the program", "; ".join(_late)
    )

__all__ = ["Backend", "available_backends", "current_backend", "select_device"]
