"""What a log line says: figures of the last steps, kept on the device until the line is due."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.precision import PRODUCTS

import oneflow as flow

from flow_train.metrics.log import StepWindow
from flow_train.metrics.peak import Utilization, utilization
from flow_train.task import Batch, Task

if TYPE_CHECKING:
    from flow_train.steps.eager import StepFigures, TrainStep

logger = logging.getLogger("oneflow_accel")


@dataclass(frozen=True)
class Figures:
    """Sums over some training steps, of all processes together.

    Attributes:
        units: images, or what else the task counts.
        samples: which of them are the rows of a batch.
        seconds: wall time.
        data_seconds: the part of it spent waiting for data.
        sums: total and count of the loss, whose count is the steps', and of the task's figures.
    """

    task: Task
    units: float = 0
    samples: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: Figures) -> Figures:
        sums = {}
        for name, (total, count) in other.sums.items():
            before = self.sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
        return Figures(
            self.task,
            self.units + other.units,
            self.samples + other.samples,
            self.seconds + other.seconds,
            self.data_seconds + other.data_seconds,
            sums,
        )

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.sums["loss"][1]

    @property
    def step_data_seconds(self) -> float:
        return self.data_seconds / self.sums["loss"][1]

    @property
    def units_per_second(self) -> float:
        return self.units / self.seconds

    def as_logged(self) -> dict[str, float]:
        """The loss and the task's figures, by their names in metrics.jsonl."""
        return {name: self.task.figure(name).value(*pair) for name, pair in self.sums.items()}


def log_line(now: Figures, mean: Figures) -> str:
    """The last steps' figures, and in brackets the epoch's so far."""

    def columns(each: Figures) -> list[tuple[str, str]]:
        shown = ((each.task.figure(name), value) for name, value in each.as_logged().items())
        return [
            ("Time", f"{each.step_seconds:6.3f}"),
            ("Data", f"{each.step_data_seconds:6.3f}"),
            *((figure.label, f"{value:{figure.form}}") for figure, value in shown),
            ("Throughput", f"{each.units_per_second:6.2f}"),
        ]

    pairs = zip(columns(now), columns(mean), strict=True)
    return "\t".join(f"{label} {last} ({whole})" for (label, last), (_, whole) in pairs)


class Meter:
    """Gathers the figures of each step; only `read` waits for the device. `now` are the figures
    that it gave last, `epoch` those of the epoch as far as they were read."""

    def __init__(self, step: TrainStep, backend: Backend, precision: str) -> None:
        self._step = step
        self._backend = backend
        self._dtype = PRODUCTS[precision]
        # The tensors that steps return are this process's share, to be summed over processes.
        self._reduce = not step.returns_global_figures
        self._window = StepWindow()
        # Known from the first batch on; None where nothing is known of the model's work.
        self._utilization: Utilization | None = None
        self._is_new = True
        self.now = self.epoch = Figures(step.task)
        self._begin()

    def _begin(self) -> None:
        self._units: float = 0
        self._samples = 0
        self._counts: dict[str, float] = {}
        self._data_seconds = 0.0
        self._grad_norm: flow.Tensor | None = None
        self._since = time.perf_counter()

    def __len__(self) -> int:
        return len(self._window)

    def begin_epoch(self) -> None:
        """Begin with the epoch's figures, and leave out what was done before it."""
        self.epoch = Figures(self._step.task)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the next figures the time since the last `read`, such as a checkpoint's."""
        self._since = time.perf_counter()

    def look_at(self, batch: Batch) -> None:
        """Before the first step, find the model's work and the device's peak from the shapes of its
        batch. The time this takes is not the step's."""
        counts = distributed.is_main() or self._step.is_collective
        if not self._is_new or not counts:
            return
        self._is_new, began = False, time.perf_counter()
        task, model = self._step.task, self._step.local_model
        self._utilization = utilization(
            lambda: task.macs_per_unit(model, batch, self._backend),
            self._backend,
            dtype=self._dtype,
        )
        if self._utilization is not None and distributed.is_main():
            logger.info("%s", self._utilization)
        self._since += time.perf_counter() - began

    def add(self, step: int, figures: StepFigures, batch: Batch, data_seconds: float) -> None:
        """Note down one step, `step` being the number of steps done, this one included; `batch` is
        this process's share, and `data_seconds` is how long the step waited for it."""
        values = {"loss": figures.loss}
        for name, each in figures.sums.items():
            values[name] = each.total
            if isinstance(each.count, flow.Tensor):
                values[f"number of {name}"] = each.count
            else:
                self._counts[name] = self._counts.get(name, 0) + each.count
        self._window.add(step, **values)
        self._grad_norm = figures.grad_norm
        self._units += self._step.task.units(batch)
        self._samples += self._step.task.size(batch)
        self._data_seconds += data_seconds

    def read(self, lr: float, epoch: float) -> dict[str, float]:
        """The values of a log line, by the names that flow_train/README.md has, over the steps (at
        least one) since the last one. What is not known is left out; `epoch` counts epochs done,
        with the part of this one. NonFiniteLossError names the first step whose loss is not
        finite."""
        processes = distributed.world_size()
        values = self._window.fetch(reduce=self._reduce)
        # Reducing takes means over the processes; sums are of all of them.
        summed_on = processes if self._reduce else 1
        sums = {"loss": (sum(values["loss"]), float(len(values["loss"])))}
        for name in self._step.task.figures:
            counts = values.get(f"number of {name}")
            count = self._counts[name] if counts is None else sum(counts)
            sums[name] = (sum(values[name]) * summed_on, count * summed_on)
        norm, task = self._grad_norm, self._step.task
        self.now = now = Figures(
            task,
            self._units * self._step.replicas,
            self._samples * self._step.replicas,
            time.perf_counter() - self._since,
            self._data_seconds,
            sums,
        )
        self.epoch += now
        self._begin()
        memory = self._backend.max_memory_allocated()
        work = self._utilization
        mfu = None if work is None else work.percent(now.units_per_second)
        known: dict[str, float | None] = {
            **now.as_logged(),
            "lr": lr,
            "grad_norm": None if norm is None else float(norm.numpy()),
            f"{task.samples}_per_second": now.samples / now.seconds,
            f"{task.unit}_per_second": now.units_per_second,
            "step_seconds": now.step_seconds,
            "data_seconds": now.step_data_seconds,
            "mfu": mfu,
            "peak_memory_gb": memory and memory / 1e9,
            "epoch": epoch,
        }
        return {name: value for name, value in known.items() if value is not None}
