"""Fixtures of the device layer."""

from __future__ import annotations

from oneflow_accel import settings
from oneflow_accel.backends import registry
from oneflow_accel.patching import session

import pytest


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device chosen, no backend made, no device asked for; as it was afterwards."""
    monkeypatch.setattr(registry, "_backends", {})
    monkeypatch.setattr(registry, "_current", None)
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    # Chosen devices are not to be held against the patches of the whole test run.
    monkeypatch.setattr(session, "_session", None)
    monkeypatch.delenv(settings.DEVICE.name, raising=False)
