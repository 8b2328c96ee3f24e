"""--benchmark: how fast the forward pass is, on fixed data under nn.Graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from oneflow_accel.backends.base import Backend

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.metrics.macs import macs_of_call

WARM_UP_RUNS = 2
TIMED_RUNS = 10
GEMM_SIZE = 2048


@dataclass(frozen=True)
class ForwardSpeed:
    """Medians over the timed runs.

    Attributes:
        images_per_second: forward passes of one image each second.
        flops_per_second: multiplications and additions of convolutions and linear layers.
        peak_flops_per_second: what the device reaches on a float32 matrix product.
        peak_source: where that figure comes from.
    """

    images_per_second: float
    flops_per_second: float
    peak_flops_per_second: float
    peak_source: str

    def __str__(self) -> str:
        share = 100 * self.flops_per_second / self.peak_flops_per_second
        return (
            f"{self.images_per_second:.2f} img/s, {self.flops_per_second / 1e12:.3f} TFLOP/s, "
            f"{share:.1f} % of {self.peak_flops_per_second / 1e12:.3f} TFLOP/s ({self.peak_source})"
        )


def forward_graph(model: nn.Module) -> nn.Graph:
    """The forward pass of `model` as an nn.Graph."""

    class ForwardGraph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, batch: flow.Tensor) -> flow.Tensor:
            return self.model(batch)

    return ForwardGraph()


def measure_forward(model: nn.Module, images: np.ndarray, backend: Backend) -> ForwardSpeed:
    """Time the forward pass of `model` (in eval mode) on `images`, already in its layout."""

    batch = flow.tensor(images, device=backend.device())
    # 2 for each multiply-add, as the literature counts.
    flops = 2 * sum(module.macs for module in macs_of_call(model, batch))
    graph = forward_graph(model)
    with flow.no_grad():
        seconds = _median_seconds(lambda: graph(batch), backend)
    peak, source = gemm_peak(backend)
    return ForwardSpeed(len(images) / seconds, flops / seconds, peak, source)


def gemm_peak(backend: Backend) -> tuple[float, str]:
    """The float32 rate of a large square matrix product in FLOP/s, and how it was measured.

    On a device that computes in host memory NumPy's BLAS is measured too: the device's peak is
    what the faster of the two reaches.
    """
    shape = (GEMM_SIZE, GEMM_SIZE)
    host = np.ones(shape, dtype=np.float32)
    matrix = flow.tensor(host, device=backend.device())
    candidates = {"measured, oneflow.matmul": lambda: flow.matmul(matrix, matrix)}
    if backend.supports("host_memory"):
        candidates["measured, numpy.matmul"] = lambda: host @ host
    rates = {
        source: 2 * GEMM_SIZE**3 / _median_seconds(run, backend, runs=5)
        for source, run in candidates.items()
    }
    best = max(rates, key=lambda source: rates[source])
    return rates[best], best


def _median_seconds(run: Callable[[], object], backend: Backend, runs: int = TIMED_RUNS) -> float:
    times = []
    for index in range(WARM_UP_RUNS + runs):
        backend.synchronize()
        start = time.perf_counter()
        run()
        backend.synchronize()
        if index >= WARM_UP_RUNS:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
