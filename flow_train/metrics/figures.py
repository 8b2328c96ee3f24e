"""What a log line says: figures of the last steps, kept on the device until the line is due."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneflow_accel import distributed

import oneflow as flow

from flow_train.metrics.log import StepWindow

if TYPE_CHECKING:
    from flow_train.steps.eager import StepFigures


@dataclass(frozen=True)
class Figures:
    """Sums over some training steps, of all processes together.

    Attributes:
        steps: how many.
        images: how many.
        seconds: wall time.
        data_seconds: the part of it spent waiting for images.
        loss_sum: sum over the steps of the mean loss of a batch.
        correct1: images whose label has the highest score.
        correct5: images whose label is among the five highest.
        grad_norm: of the last step's gradients, before they are clipped; None where it is not
            known.
    """

    steps: int = 0
    images: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    loss_sum: float = 0.0
    correct1: float = 0.0
    correct5: float = 0.0
    grad_norm: float | None = None

    def __add__(self, other: Figures) -> Figures:
        *summed, _ = self.__dataclass_fields__
        sums = {name: getattr(self, name) + getattr(other, name) for name in summed}
        return Figures(**sums, grad_norm=other.grad_norm)

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


class FigureWindow:
    """Gathers the figures of each step; only `fetch` waits for the device.

    Args:
        reduce: the tensors that steps return are this process's share, to be summed over processes.
    """

    def __init__(self, *, reduce: bool) -> None:
        self._reduce = reduce
        self._window = StepWindow()
        self._begin()

    def _begin(self) -> None:
        self._images = 0
        self._data_seconds = 0.0
        self._grad_norm: flow.Tensor | None = None
        self._since = time.perf_counter()

    def __len__(self) -> int:
        """Number of steps since the last `fetch`."""
        return len(self._window)

    def leave_out(self, seconds: float) -> None:
        """Leave out of the next figures what has taken so long just now."""
        self._since += seconds

    def restart_clock(self) -> None:
        """Leave out of the next figures the time since the last `fetch`, such as a checkpoint's."""
        self._since = time.perf_counter()

    def add(self, step: int, figures: StepFigures, images: int, data_seconds: float) -> None:
        """Note down one step.

        Args:
            step: steps done, this one included.
            figures: as `TrainStep.step` returns them.
            images: in this process's share of the batch.
            data_seconds: how long the step waited for them.
        """
        loss, correct1, correct5, norm = figures
        self._window.add(step, loss=loss, correct1=correct1, correct5=correct5)
        self._grad_norm = norm
        self._images += images
        self._data_seconds += data_seconds

    def fetch(self) -> Figures:
        """The window's figures, with at least one step in it; a new window begins.

        Raises:
            NonFiniteLossError: names the first step whose loss is not finite.
        """
        processes = distributed.world_size()
        values = self._window.fetch(reduce=self._reduce)
        # Reducing takes means over the processes; correct answers are counted, not averaged.
        counted_on = processes if self._reduce else 1
        result = Figures(
            len(values["loss"]),
            self._images * processes,
            time.perf_counter() - self._since,
            self._data_seconds,
            sum(values["loss"]),
            sum(values["correct1"]) * counted_on,
            sum(values["correct5"]) * counted_on,
            None if self._grad_norm is None else float(self._grad_norm.numpy()),
        )
        self._begin()
        return result
