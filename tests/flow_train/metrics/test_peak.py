"""What the MFU is a share of."""

from __future__ import annotations

import dataclasses

from oneflow_accel import distributed, machine
from oneflow_accel.backends import resolve
from oneflow_accel.kernels import plugin

import pytest

from flow_train.metrics import peak
from flow_train.metrics.peak import devices_of, peak_of


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


@pytest.mark.parametrize(
    ("processes", "local", "cores", "devices"),
    [(4, 4, 2, 2), (2, 2, 2, 2), (1, 1, 2, 1), (4, 2, 1, 2), (4, 2, 8, 4)],
)
def test_cores_that_processes_share_count_once(monkeypatch, processes, local, cores, devices):
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    monkeypatch.setattr(distributed, "local_world_size", lambda: local)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    one_thread = dataclasses.replace(plugin.state(), num_threads=1)
    monkeypatch.setattr(plugin, "state", lambda: one_thread)
    assert devices_of(resolve("cpu").backend) == devices


def test_a_product_that_is_over_soon_is_not_the_peak(monkeypatch):
    tried = []
    monkeypatch.setattr(peak, "seconds_of_runs", lambda *_, runs: [[0.02, 0.04][len(tried) == 2]])
    rate = peak._measured("", lambda size: tried.append(size), None).flops
    assert (tried, rate) == ([512, 1024], 2 * 1024**3 / 0.04)
