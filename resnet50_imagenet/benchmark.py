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


def count_flops(model: nn.Module, images: flow.Tensor) -> int:
    """Floating-point operations of one forward pass: 2 for each multiply-add of every convolution
    and linear layer, the rest left out, as the literature counts."""
    total = 0

    def add(module: nn.Module, _inputs: tuple, output: flow.Tensor) -> None:
        nonlocal total
        # Each output position of each channel takes weight.numel() / channels multiply-adds, in
        # either layout.
        total += 2 * output.numel() * module.weight.numel() // module.weight.shape[0]

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    # OneFlow 0.9.0 gives hooks no handle to remove them by.
    saved = [(layer, layer._forward_hooks.copy()) for layer in layers]
    for layer in layers:
        layer.register_forward_hook(add)
    try:
        with flow.no_grad():
            model(images)
    finally:
        for layer, hooks in saved:
            layer._forward_hooks = hooks
    return total


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
    flops = count_flops(model, batch)
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
