"""What a configuration asks of a device."""

from __future__ import annotations

from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError


def require_feature(backend: Backend, feature: str, key: str, instead: str) -> None:
    """Refuse a setting that the device cannot have.

    Args:
        backend: the device.
        feature: one of `oneflow_accel.backends.base.FEATURES`.
        key: the setting, as "trainer.graph=true".
        instead: what to set.

    Raises:
        UserError: the device does not have the feature; names both settings and the reason.
    """
    support = backend.supports(feature)
    if not support:
        raise UserError(f"{key}: {backend.name} cannot do this ({support.reason}); set {instead}")
