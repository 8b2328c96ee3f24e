"""What a log line says: figures of the last steps, kept on the device until the line is due."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.precision import PRECISIONS

import numpy as np
import oneflow as flow

from flow_train.metrics.log import StepWindow
from flow_train.metrics.peak import Utilization, utilization

if TYPE_CHECKING:
    from flow_train.steps.eager import StepFigures, TrainStep

logger = logging.getLogger("oneflow_accel")

# The dtype that a device computes products in, by precision.
_DTYPES = {name: name for name in PRECISIONS} | {"float32-bf16-products": "bfloat16"}


@dataclass(frozen=True)
class Figures:
    """Sums over some training steps, of all processes together.

    Attributes:
        seconds: wall time.
        data_seconds: the part of it spent waiting for images.
        loss_sum: sum over the steps of the mean loss of a batch.
        correct1: images whose label has the highest score.
        correct5: images whose label is among the five highest.
    """

    steps: int = 0
    images: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    loss_sum: float = 0.0
    correct1: float = 0.0
    correct5: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def step_data_seconds(self) -> float:
        return self.data_seconds / self.steps

    @property
    def loss(self) -> float:
        return self.loss_sum / self.steps

    @property
    def acc1(self) -> float:
        """Percent."""
        return 100 * self.correct1 / self.images

    @property
    def acc5(self) -> float:
        """Percent."""
        return 100 * self.correct5 / self.images

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def log_line(now: Figures, mean: Figures) -> str:
    """The last steps' figures, and in brackets the epoch's so far."""
    pairs = (
        ("Time", "step_seconds", "6.3f"),
        ("Data", "step_data_seconds", "6.3f"),
        ("Loss", "loss", ".4e"),
        ("Acc@1", "acc1", "6.2f"),
        ("Acc@5", "acc5", "6.2f"),
        ("Throughput", "images_per_second", "6.2f"),
    )
    return "\t".join(
        f"{label} {getattr(now, name):{form}} ({getattr(mean, name):{form}})"
        for label, name, form in pairs
    )


class Meter:
    """Gathers the figures of each step; only `read` waits for the device. `now` are the figures
    that it gave last, `epoch` those of the epoch as far as they were read."""

    def __init__(self, step: TrainStep, backend: Backend, precision: str) -> None:
        self._step = step
        self._backend = backend
        self._dtype = _DTYPES[precision]
        # The tensors that steps return are this process's share, to be summed over processes.
        self._reduce = not step.returns_global_figures
        self._window = StepWindow()
        # Known from the first batch on; None where nothing is known of the model's work.
        self._utilization: Utilization | None = None
        self._is_new = True
        self.now = self.epoch = Figures()
        self._begin()

    def _begin(self) -> None:
        self._images = 0
        self._data_seconds = 0.0
        self._grad_norm: flow.Tensor | None = None
        self._since = time.perf_counter()

    def __len__(self) -> int:
        return len(self._window)

    def begin_epoch(self) -> None:
        """Begin with the epoch's figures, and leave out what was done before it."""
        self.epoch = Figures()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the next figures the time since the last `read`, such as a checkpoint's."""
        self._since = time.perf_counter()

    def look_at(self, images: np.ndarray) -> None:
        """Before the first step, find the model's work and the device's peak from the shape of its
        images. The time this takes is not the step's."""
        counts = distributed.is_main() or self._step.is_collective
        if not self._is_new or not counts:
            return
        self._is_new, began = False, time.perf_counter()
        self._utilization = utilization(
            self._step.local_model,
            flow.zeros(1, *images.shape[1:], device=self._backend.device()),
            self._backend,
            dtype=self._dtype,
        )
        if self._utilization is not None and distributed.is_main():
            logger.info("%s", self._utilization)
        self._since += time.perf_counter() - began

    def add(self, step: int, figures: StepFigures, images: int, data_seconds: float) -> None:
        """Note down one step, `step` being the number of steps done, this one included; `images`
        are those of this process, and `data_seconds` is how long the step waited for them."""
        loss, correct1, correct5, norm = figures
        self._window.add(step, loss=loss, correct1=correct1, correct5=correct5)
        self._grad_norm = norm
        self._images += images
        self._data_seconds += data_seconds

    def read(self, lr: float, epoch: float) -> dict[str, float]:
        """The values of a log line, by the names that flow_train/README.md has, over the steps (at
        least one) since the last one. What is not known is left out; `epoch` counts epochs done,
        with the part of this one. NonFiniteLossError names the first step whose loss is not
        finite."""
        processes = distributed.world_size()
        values = self._window.fetch(reduce=self._reduce)
        # Reducing takes means over the processes; correct answers are counted, not averaged.
        counted_on = processes if self._reduce else 1
        norm = self._grad_norm
        self.now = now = Figures(
            len(values["loss"]),
            self._images * processes,
            time.perf_counter() - self._since,
            self._data_seconds,
            sum(values["loss"]),
            sum(values["correct1"]) * counted_on,
            sum(values["correct5"]) * counted_on,
        )
        self.epoch += now
        self._begin()
        memory = self._backend.max_memory_allocated()
        work = self._utilization
        mfu = None if work is None else work.percent(now.images_per_second)
        known: dict[str, float | None] = {
            "loss": now.loss,
            "acc1": now.acc1,
            "acc5": now.acc5,
            "lr": lr,
            "grad_norm": None if norm is None else float(norm.numpy()),
            "images_per_second": now.images_per_second,
            "step_seconds": now.step_seconds,
            "data_seconds": now.step_data_seconds,
            "mfu": mfu,
            "peak_memory_gb": memory and memory / 1e9,
            "epoch": epoch,
        }
        return {name: value for name, value in known.items() if value is not None}
