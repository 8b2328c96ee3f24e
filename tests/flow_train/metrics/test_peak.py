"""What the MFU is a share of."""

from __future__ import annotations

from oneflow_accel.backends import resolve

import pytest

from flow_train.metrics.peak import peak_of


@pytest.fixture(autouse=True)
def measured_anew():
    """A process measures once."""
    peak_of.cache_clear()
    yield
    peak_of.cache_clear()


def test_the_environment_comes_before_a_measurement(monkeypatch):
    monkeypatch.setenv("FLOW_TRAIN_PEAK", "312")
    assert str(peak_of(resolve("cpu").backend)) == "312.000 TFLOP/s (FLOW_TRAIN_PEAK)"
    peak_of.cache_clear()
    monkeypatch.delenv("FLOW_TRAIN_PEAK")
    assert "(measured, " in str(peak_of(resolve("cpu").backend))
