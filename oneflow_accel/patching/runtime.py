"""What patched code asks the device layer while it runs.

A patch must work where oneflow_accel is not imported (it may be on disk), so patched code looks
this module up in `sys.modules` and takes its absence for "no".
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import oneflow
    from oneflow.framework.multi_client_session import MultiClientSession


def device_supports(tensor: oneflow.Tensor, feature: str) -> bool:
    """Whether the device that a tensor (local or global) is on has a feature, a key of
    `oneflow_accel.backends.FEATURES`."""
    device_type = tensor.placement.type if tensor.is_global else tensor.device.type
    return _device_type_supports(device_type, feature)


# Kept, as patched functions ask at every call.
@lru_cache
def _device_type_supports(device_type: str, feature: str) -> bool:
    from oneflow_accel.backends import registry

    candidate = registry.candidates().get(device_type)
    backend = candidate.backend if candidate is not None else None
    return backend is not None and bool(backend.supports(feature))


def session_begins(session: MultiClientSession) -> None:
    """Give the CPU operators of this session's graphs one thread; before its first graph is
    compiled.

    The kernels of the plug-in use all cores, and a thread that runs them has an OpenMP team of its
    own. With more threads than one, libgomp manages more than there are cores; it then hardly spins
    at its barriers, and each kernel has to wake its team.
    """
    from oneflow_accel.kernels import plugin

    if plugin.state().loaded:
        resource = session.resource
        resource.cpu_device_num = 1
        session.update_resource_eagerly(resource)


def draws_masks(x: oneflow.Tensor) -> bool:
    """Whether dropout of `x` is to take its mask from `oneflow.rand`: the operator draws the right
    ones on one process in eager mode only, and not every device has the other."""
    import oneflow as flow

    several = x.is_global and (x.is_lazy or flow.env.get_world_size() > 1)
    return several and device_supports(x, "uniform_random")
