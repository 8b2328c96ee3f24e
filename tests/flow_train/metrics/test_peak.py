"""What the MFU is a share of."""

from __future__ import annotations

from oneflow_accel.backends import resolve
from oneflow_accel.errors import UserError

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


@pytest.mark.parametrize("value", ["fast", "0", "-1", "nan", "inf"])
def test_a_peak_that_is_none(monkeypatch, value):
    monkeypatch.setenv("FLOW_TRAIN_PEAK", value)
    with pytest.raises(UserError, match=f"FLOW_TRAIN_PEAK={value}: has to be the TFLOP/s"):
        peak_of(resolve("cpu").backend)
