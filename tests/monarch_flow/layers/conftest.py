"""The device, chosen once: eager operators are slow before that."""

from __future__ import annotations

import oneflow_accel

import pytest


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    oneflow_accel.select_device()
