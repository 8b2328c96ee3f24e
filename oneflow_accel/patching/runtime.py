"""What patched code asks the device layer while it runs.

A patch must work where oneflow_accel is not imported (it may be on disk), so patched code looks
this module up in `sys.modules` and takes its absence for "no".
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneflow_accel.backends import Backend

    import oneflow


def device_supports(tensor: oneflow.Tensor, feature: str) -> bool:
    """Whether the device that a tensor is on has a feature.

    Args:
        tensor: local or global, of any shape and dtype.
        feature: a key of `oneflow_accel.backends.FEATURES`.
    """
    device_type = tensor.placement.type if tensor.is_global else tensor.device.type
    backend = _backend(device_type)
    return backend is not None and bool(backend.supports(feature))


@lru_cache
def _backend(device_type: str) -> Backend | None:
    from oneflow_accel.backends import registry

    candidate = registry.candidates().get(device_type)
    return candidate.backend if candidate is not None else None
