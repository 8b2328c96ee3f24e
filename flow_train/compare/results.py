"""What a run's metric log says of the run: accuracy or perplexity, size, speed, time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flow_train.metrics.log import metric_series, read_metrics

# A value in the log of a test: 1 if its images are the validation images, else 0.
ON_VALIDATION_IMAGES = "on_validation_images"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Quality:
    """What runs are judged by: its name in logs and in words, which one it is, its unit; what a
    model is given, what curves are drawn along, and which of two values is better."""

    key: str
    name: str
    said: str
    unit: str
    samples: str
    along: str
    best: Callable[[Sequence[float]], float]


ACCURACY = Quality("acc1", "accuracy", "top-1", " %", "images", "epoch", max)
PERPLEXITY = Quality("perplexity", "perplexity", "of the tokens", "", "tokens", "step", min)


@dataclass(frozen=True)
class Phase:
    """The part of a run in which its layers did not change: one, or two where structured layers
    became dense.

    Attributes:
        parameters: trainable values, None where they were not logged.
        gmacs: 10^9 multiply-accumulates per image or token, likewise.
        rate: images or tokens per second of training steps, waiting for data included, validation
            not: the median of the log lines weighted by their steps, without the first line, which
            has all that is done for the first time. None where nothing was trained.
        quartiles: of the same speed: a quarter of the steps were slower than the first, and a
            quarter faster than the second.
    """

    parameters: int | None
    gmacs: float | None
    rate: float | None
    quartiles: tuple[float, float] | None


@dataclass(frozen=True)
class Results:
    """A run's figures. Its quality is top-1 accuracy in percent, or the perplexity of tokens, None
    where it was not measured.

    Attributes:
        tested: on the test data with the best epoch's weights; where a log has no test, as those of
            language models, the best of `validated`.
        test_is_validation: whether that is the validation data; None where the log does not say.
        initial: on the validation data before the first step.
        epochs: of the validations, 0 for the one before the first step; steps of language models.
        validated: on the validation data, one for each of `epochs`.
        switch_epoch: the one in which the second phase began.
        seconds: spent on training steps, waiting for data included.
        waiting: the share of `seconds` that was spent waiting for data.
        quality: which one it is.
        clock: how much of `seconds` was spent before each of `validated`.
        predicted: percent of tokens that were predicted right, where the best of `validated` was.
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
    quality: Quality = ACCURACY
    clock: tuple[float, ...] = ()
    predicted: float | None = None

    def at(self, seconds: float) -> float | None:
        """The quality after so much training, on the line between two validations; None before the
        first one."""
        if not self.clock or seconds < self.clock[0]:
            return None
        return float(np.interp(seconds, self.clock, self.validated))

    @property
    def last(self) -> float | None:
        return self.validated[-1] if self.validated and self.epochs[-1] > 0 else None

    @property
    def best_epoch(self) -> float | None:
        """The first one after training began whose validation is the best."""
        trained = {at: v for v, at in zip(self.validated, self.epochs, strict=True) if at}
        if not trained:
            return None
        best = self.quality.best(list(trained.values()))
        return next(at for at, value in trained.items() if value == best)

    @property
    def best_before_switch(self) -> bool:
        """Whether the tested weights are those of a model whose structured layers became dense
        later."""
        best, switch = self.best_epoch, self.switch_epoch
        return best is not None and switch is not None and best <= switch


def read_results(metrics_jsonl: Path | str) -> Results:
    """Read the log of a run that has ended; OSError if it cannot be read."""
    lines = read_metrics(metrics_jsonl)
    is_text = len(metric_series(lines, "train", PERPLEXITY.key)[0]) > 0
    quality = PERPLEXITY if is_text else ACCURACY
    tests = metric_series(lines, "test", quality.key)[1].tolist()
    _, same = metric_series(lines, "test", ON_VALIDATION_IMAGES)
    val_steps, validated = map(np.ndarray.tolist, metric_series(lines, "val", quality.key))
    epoch_at = dict(
        zip(*map(np.ndarray.tolist, metric_series(lines, "train", "epoch")), strict=True)
    )

    def place(step: int) -> float:
        return float(step if is_text else epoch_at.get(step, 0.0))

    windows = _windows(lines)
    switch = next((line["step"] for line in lines if line["split"] == "switch"), None)
    spent = [sum(w.total("step_seconds") for w in windows if w.end <= at) for at in val_steps]
    seconds = sum(window.total("step_seconds") for window in windows)
    waited = sum(window.total("data_seconds") for window in windows)
    best = quality.best(validated) if validated else None
    hits = dict(zip(*metric_series(lines, "val", "accuracy"), strict=True))
    hit = hits.get(val_steps[validated.index(best)]) if best is not None else None
    return Results(
        tested=tests[-1] if tests else best if is_text else None,
        test_is_validation=bool(same[-1]) if len(same) else True if is_text else None,
        initial=validated[0] if val_steps and val_steps[0] == 0 else None,
        epochs=tuple(map(place, val_steps)),
        validated=tuple(validated),
        phases=_phases(lines, windows, switch, f"{quality.samples}_per_second"),
        switch_epoch=None if switch is None else place(switch),
        seconds=seconds,
        waiting=waited / seconds if seconds else 0.0,
        quality=quality,
        clock=tuple(spent),
        predicted=None if hit is None else 100 * float(hit),
    )


def data_of_tests(runs: Sequence[Results]) -> str:
    found = {results.test_is_validation for results in runs if results.tested is not None}
    samples = runs[0].quality.samples
    if found == {True}:
        return f"the validation {samples}"
    return f"the test {samples}" if found == {False} else f"test or validation {samples}"


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
    lines: Sequence[Line], windows: Sequence[_Window], switch: int | None, rate: str
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
        low, middle, high = _speeds(part[1:] or part, rate) if part else (None,) * 3
        phases.append(
            Phase(
                int(parameters[logged]) if parameters else None,
                gmacs[logged] if gmacs else None,
                middle,
                None if low is None or high is None else (low, high),
            )
        )
    return tuple(phases)


def _speeds(windows: Sequence[_Window], rate: str) -> list[float]:
    """Samples per second that a quarter, a half and three quarters of the steps did not exceed."""
    ordered = sorted(windows, key=lambda window: window.values[rate])
    sums = np.cumsum([window.steps for window in ordered])
    places = np.searchsorted(sums, np.asarray((0.25, 0.5, 0.75)) * sums[-1])
    return [ordered[place].values[rate] for place in places.tolist()]


def ended_with_a_test(metrics_jsonl: Path | str) -> bool:
    """Whether a run did all of its steps and was tested, by its log."""
    try:
        lines = read_metrics(metrics_jsonl)
    except OSError:
        return False
    trained, tested = (metric_series(lines, split, "loss")[0] for split in ("train", "test"))
    return len(tested) > 0 and len(trained) > 0 and bool(tested[-1] == trained[-1])
