"""What a run's metric log says of the run: accuracy, size, speed, time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flow_train.metrics.log import metric_series, read_metrics

# A value in the log of a test: 1 if its images are the validation images, else 0.
ON_VALIDATION_IMAGES = "on_validation_images"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """The part of a run in which its layers did not change: one, or two where structured layers
    became dense.

    Attributes:
        parameters: trainable values, None where they were not logged.
        gmacs: 10^9 multiply-accumulates per image, likewise.
        images_per_second: of training steps, waiting for data included, validation not: the median
            of the log lines weighted by their steps, without the first line, which has all that is
            done for the first time. None where nothing was trained.
        quartiles: of the same speed: a quarter of the steps were slower than the first, and a
            quarter faster than the second.
    """

    parameters: int | None
    gmacs: float | None
    images_per_second: float | None
    quartiles: tuple[float, float] | None


@dataclass(frozen=True)
class Results:
    """A run's figures; accuracy is top-1 in percent, None where it was not measured.

    Attributes:
        tested: on the test images with the best epoch's weights.
        test_is_validation: whether those are the validation images; None where the log does not
            say.
        initial: on the validation images before the first step.
        epochs: of the validations, 0 for the one before the first step.
        validated: on the validation images, one for each of `epochs`.
        switch_epoch: the one in which the second phase began.
        seconds: spent on training steps, waiting for images included.
        waiting: the share of `seconds` that was spent waiting for images.
    """

    tested: float | None
    test_is_validation: bool | None
    initial: float | None
    epochs: tuple[float, ...]
    validated: tuple[float, ...]
    phases: tuple[Phase, ...]
    switch_epoch: float | None
    seconds: float
    waiting: float

    @property
    def last(self) -> float | None:
        return self.validated[-1] if self.validated and self.epochs[-1] > 0 else None

    @property
    def best_epoch(self) -> float | None:
        """The first one after training began whose validation accuracy is the highest."""
        trained = [(acc, -at) for acc, at in zip(self.validated, self.epochs, strict=True) if at]
        return -max(trained)[1] if trained else None

    @property
    def best_before_switch(self) -> bool:
        """Whether the tested weights are those of a model whose structured layers became dense
        later."""
        best, switch = self.best_epoch, self.switch_epoch
        return best is not None and switch is not None and best <= switch


def read_results(metrics_jsonl: Path | str) -> Results:
    """Read the log of a run that has ended; OSError if it cannot be read."""
    lines = read_metrics(metrics_jsonl)
    _, tested = metric_series(lines, "test", "acc1")
    _, same = metric_series(lines, "test", ON_VALIDATION_IMAGES)
    val_steps, validated = metric_series(lines, "val", "acc1")
    epoch_at = dict(
        zip(*map(np.ndarray.tolist, metric_series(lines, "train", "epoch")), strict=True)
    )
    epochs = [epoch_at.get(step, 0.0) for step in val_steps.tolist()]
    windows = _windows(lines)
    switch = next((line["step"] for line in lines if line["split"] == "switch"), None)
    seconds = sum(window.total("step_seconds") for window in windows)
    waited = sum(window.total("data_seconds") for window in windows)
    return Results(
        tested=float(tested[-1]) if len(tested) else None,
        test_is_validation=bool(same[-1]) if len(same) else None,
        initial=float(validated[0]) if len(val_steps) and val_steps[0] == 0 else None,
        epochs=tuple(epochs),
        validated=tuple(validated.tolist()),
        phases=_phases(lines, windows, switch),
        switch_epoch=None if switch is None else epoch_at.get(switch, 0.0),
        seconds=seconds,
        waiting=waited / seconds if seconds else 0.0,
    )


def images_of_accuracy(runs: Iterable[Results]) -> str:
    found = {results.test_is_validation for results in runs if results.tested is not None}
    if found == {True}:
        return "the validation images"
    return "the test images" if found == {False} else "test or validation images"


def macs_unit(runs: Iterable[Results]) -> tuple[str, float]:
    """The unit in which all figures have digits before the point, and how many of it are 10^9."""
    known = [phase.gmacs for results in runs for phase in results.phases if phase.gmacs]
    return ("GMACs", 1.0) if not known or min(known) >= 1 else ("10^6 MACs", 1e3)


@dataclass(frozen=True)
class _Window:
    """The steps that one log line is about: the last one, how many, and what the line says."""

    end: int
    steps: int
    values: Mapping[str, Any]

    def total(self, name: str) -> float:
        """Of a value that is a mean over the steps."""
        return self.values[name] * self.steps


def _windows(lines: Iterable[Line]) -> list[_Window]:
    windows, done = [], 0
    for line in lines:
        if line["split"] == "train" and line["step"] > done:
            windows.append(_Window(line["step"], line["step"] - done, line["values"]))
            done = line["step"]
    return windows


def _phases(
    lines: Sequence[Line], windows: Sequence[_Window], switch: int | None
) -> tuple[Phase, ...]:
    # Sizes are logged when the run begins, is resumed, and when its layers have become dense.
    parameters, gmacs = (
        metric_series(lines, "model", name)[1].tolist() for name in ("params_trainable", "gmacs")
    )
    parts = {-1: list(windows)}
    if switch is not None:
        parts = {
            0: [window for window in windows if window.end <= switch],
            -1: [window for window in windows if window.end > switch],
        }
    phases = []
    for logged, part in parts.items():
        if not part and len(parts) > 1:
            continue
        low, middle, high = _speeds(part[1:] or part) if part else (None,) * 3
        phases.append(
            Phase(
                int(parameters[logged]) if parameters else None,
                gmacs[logged] if gmacs else None,
                middle,
                None if low is None or high is None else (low, high),
            )
        )
    return tuple(phases)


def _speeds(windows: Sequence[_Window]) -> list[float]:
    """Images per second that a quarter, a half and three quarters of the steps did not exceed."""
    ordered = sorted(windows, key=lambda window: window.values["images_per_second"])
    sums = np.cumsum([window.steps for window in ordered])
    places = np.searchsorted(sums, np.asarray((0.25, 0.5, 0.75)) * sums[-1])
    return [ordered[place].values["images_per_second"] for place in places.tolist()]


def ended_with_a_test(metrics_jsonl: Path | str) -> bool:
    """Whether a run did all of its steps and was tested, by its log."""
    try:
        lines = read_metrics(metrics_jsonl)
    except OSError:
        return False
    trained, tested = (metric_series(lines, split, "loss")[0] for split in ("train", "test"))
    return len(tested) > 0 and len(trained) > 0 and bool(tested[-1] == trained[-1])
