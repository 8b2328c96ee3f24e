"""The device layer: picks device, kernels and collectives for everything in this code base.

Import it before oneflow: patches to oneflow are applied while oneflow is imported, and the CPU
kernels are registered before the first operation runs.
"""

# ruff: noqa: E402, I001 - the order below is what this module is for.

import sys
from contextlib import suppress

from oneflow_accel import interrupt, patching, rendezvous

patching.install()
# Where oneflow is there already, the processes have met.
if "oneflow" not in sys.modules:
    rendezvous.wait_for_rank_zero()

# Before the backends: which patches oneflow needs depends on the device, so that importing oneflow
# imports the backends, which must find a module of oneflow then and not import it themselves.
import oneflow  # noqa: F401

from oneflow_accel.backends import (
    Backend,
    available_backends,
    current_backend,
    select_device,
)
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

interrupt.give_back()

# A wrong environment variable is raised again by select_device(), where a command line can print
# it as one sentence.
with suppress(UserError):
    plugin.load()

__all__ = [
    "Backend",
    "available_backends",
    "current_backend",
    "select_device",
]
