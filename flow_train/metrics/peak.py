"""How near a run comes to what its device can do: model FLOPs utilization, MFU.

The FLOPs are those of the model (Chowdhery et al. 2022, "PaLM", appendix B), whatever the kernels
really do; the peak is the one that the device's table states or, where it has none, as for a CPU,
the rate of a matrix product measured here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from operator import matmul
from typing import Any

from oneflow_accel import distributed, machine, settings
from oneflow_accel.backends.base import Backend
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow

from flow_train.metrics.work import training_flops

logger = logging.getLogger("oneflow_accel")

_WARM_UP_RUNS = 2
# A product that is measured takes this long: a smaller one does not reach the peak. On two cores
# 1,024 x 1,024 gets to 0.10 or 0.12 TFLOP/s, where 1,536 x 1,536 and larger ones are at 0.14.
_LEAST_SECONDS = 0.03
_SIZES = (512, 1024, 1536, 2048, 4096)


@dataclass(frozen=True)
class Peak:
    """The most FLOP/s of one device in matrix products, and where that figure comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.3f} TFLOP/s ({self.source})"


@dataclass(frozen=True)
class Utilization:
    """The work of a training step beside the device's peak: `flops` of training on one sample (an
    image, a token), `peak` of one device."""

    flops: float
    peak: Peak
    devices: int = 1

    def percent(self, samples_per_second: float) -> float:
        """The MFU at a rate of all devices together."""
        return 100 * samples_per_second * self.flops / (self.devices * self.peak.flops)

    def __str__(self) -> str:
        work = f"{self.flops / 1e9:.3g} GFLOP to train on one sample"
        return f"MFU: {work}, of {self.devices} x {self.peak}"


def devices_of(backend: Backend) -> int:
    """How many times this job has what `peak_of` is of: once for each process, but processes that
    compute on the same cores do not have these twice."""
    processes, local = distributed.world_size(), distributed.local_world_size()
    if not backend.supports("host_memory"):
        return processes
    at_once = machine.cores() // plugin.state().num_threads
    return processes // local * min(local, max(1, at_once))


def utilization(
    count_macs: Callable[[], float], backend: Backend, *, dtype: str
) -> Utilization | None:
    """For a model in training, with the multiply-accumulates of its forward pass for one sample;
    None where these are not known. `dtype`, such as "float32", is what the device computes in."""
    try:
        macs = count_macs()
    # A model that cannot be counted still trains, only without an MFU.
    except Exception as error:
        logger.debug("no MFU: %s", error)
        return None
    # Where a forward pass takes all processes, one of them measures the peak.
    if not macs or not distributed.is_main():
        return None
    return Utilization(training_flops(macs), peak_of(backend, dtype), devices_of(backend))


@cache
def peak_of(backend: Backend, dtype: str = "float32") -> Peak:
    """The peak of one device: FLOW_TRAIN_PEAK of the environment, in TFLOP/s, or what its table
    says, or else measured, once in a process.

    On a device that computes in host memory NumPy's BLAS is measured too: the peak is what the
    faster of the two reaches.
    """
    given = settings.PEAK.get()
    if given is not None:
        return Peak(1e12 * given, settings.PEAK.name)
    stated = backend.properties().peak_flops.get(dtype)
    if stated:
        return Peak(stated, f"{backend.properties().name}, {dtype}")
    kinds = {"dtype": getattr(flow, dtype), "device": backend.device()}
    peaks = [_measured("oneflow.matmul", lambda size: flow.ones(size, size, **kinds), backend)]
    if backend.supports("host_memory") and dtype == "float32":
        peaks.append(_measured("numpy.matmul", lambda size: np.ones((size, size), "f4"), backend))
    return max(peaks, key=lambda peak: peak.flops)


def _measured(name: str, make: Callable[[int], Any], backend: Backend) -> Peak:
    """The best rate of square products of matrices, which `make` makes, up to the first that takes
    long enough."""
    rate = 0.0
    for size in _SIZES:
        matrix = make(size)
        with flow.no_grad():
            seconds = min(seconds_of_runs(partial(matmul, matrix, matrix), backend, runs=5))
        rate = max(rate, 2 * size**3 / seconds)
        if seconds >= _LEAST_SECONDS:
            break
    return Peak(rate, f"measured, {name}")


def seconds_of_runs(run: Callable[[], object], backend: Backend, runs: int) -> list[float]:
    """Of each of several runs, after some to warm up; each waits for the device."""
    times = []
    for index in range(_WARM_UP_RUNS + runs):
        backend.synchronize()
        start = time.perf_counter()
        run()
        backend.synchronize()
        if index >= _WARM_UP_RUNS:
            times.append(time.perf_counter() - start)
    return times
