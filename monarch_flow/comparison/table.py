"""The runs of a study as one Markdown page: a table, and what one has to know to read it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flow_train.metrics.progress import format_eta
from monarch_flow.comparison.plan import PlannedRun
from monarch_flow.comparison.results import Phase, Results, images_of_accuracy, macs_unit
from monarch_flow.comparison.study import Study

# A larger share of waiting than this is worth a sentence: the speed is not the model's then.
_MUCH_WAITING = 0.1
# Half of the steps further apart than this, relative to the median, were not at one speed.
_MUCH_SPREAD = 0.1
_NOTHING = "-"


@dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
        run: what it is.
        state: "done", or why there is nothing to show.
        results: None where the run is not done.
        where: device and date of its end, empty where it is not done.
    """

    run: PlannedRun
    state: str
    results: Results | None = None
    where: str = ""

    @property
    def name(self) -> str:
        return self.run.row.name


def format_page(study: Study, entries: Sequence[Entry], picture: str | None) -> str:
    """The page.

    Args:
        study: what was run.
        entries: its rows.
        picture: the file that shows them, relative to the page; None where there is none.
    """
    lines = [f"# {study.title}", "", *_table(entries), ""]
    if picture is not None:
        lines += [f"![{study.title}]({picture})", ""]
    lines += [*_notes(entries), "The runs:", ""]
    for entry in entries:
        command = shlex.join(("python", "-m", "monarch_flow.train", *entry.run.arguments))
        lines.append(f"- {entry.name}: `{command}`")
    return "\n".join(lines) + "\n"


def _table(entries: Sequence[Entry]) -> list[str]:
    baseline = next((_speed(entry) for entry in entries), None)
    known = [entry.results for entry in entries if entry.results is not None]
    unit, per_unit = macs_unit(known)
    columns: list[tuple[str, Callable[[Results], str]]] = [
        ("accuracy", lambda results: _percent(results.tested)),
        ("after the last epoch", lambda results: _percent(results.last)),
        ("before the first step", lambda results: _percent(results.initial)),
        ("parameters", lambda results: _by_phase(results, _parameters)),
        (unit, lambda results: _by_phase(results, lambda phase: _macs(phase, per_unit))),
        ("training images/s", lambda results: _by_phase(results, _images_per_second)),
        ("speed", lambda results: _by_phase(results, lambda phase: _ratio(phase, baseline))),
        ("training time", lambda results: format_eta(results.seconds)),
    ]
    # A column that nothing stands in is left out.
    columns = [column for column in columns if any(column[1](r) != _NOTHING for r in known)]
    if len(known) < len(entries):
        columns.append(("state", lambda results: "done"))
    lines = [_line(["run", *(title for title, _ in columns)])]
    lines.append(_line(["---", *("---:" for _ in columns)]))
    for entry in entries:
        if entry.results is None:
            cells = [_NOTHING] * (len(columns) - 1) + [entry.state]
        else:
            cells = [cell(entry.results) for _, cell in columns]
        lines.append(_line([entry.name, *cells]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _by_phase(results: Results, cell: Callable[[Phase], str]) -> str:
    # What does not change at the switch is said once.
    cells = dict.fromkeys(cell(phase) for phase in results.phases)
    return ", then ".join(cells) or _NOTHING


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f} %"


def _parameters(phase: Phase) -> str:
    return _NOTHING if phase.parameters is None else f"{phase.parameters:,}"


def _macs(phase: Phase, per_unit: float) -> str:
    if phase.gmacs is None:
        return _NOTHING
    macs = phase.gmacs * per_unit
    return f"{macs:,.0f}" if macs >= 1000 else f"{macs:.4g}"


def _images_per_second(phase: Phase) -> str:
    if phase.images_per_second is None:
        return _NOTHING
    low, high = phase.quartiles or (phase.images_per_second,) * 2
    return f"{phase.images_per_second:.4g} ({low:.4g} to {high:.4g})"


def _ratio(phase: Phase, baseline: float | None) -> str:
    if phase.images_per_second is None or not baseline:
        return _NOTHING
    return f"{phase.images_per_second / baseline:.2f} x"


def _speed(entry: Entry) -> float | None:
    """That of an entry's first phase."""
    return entry.results.phases[0].images_per_second if entry.results is not None else None


def _notes(entries: Sequence[Entry]) -> list[str]:
    known = [(entry, entry.results) for entry in entries if entry.results is not None]
    if not known:
        return []
    notes = [
        f"Accuracy is top-1 on {images_of_accuracy(result for _, result in known)}, with the "
        "weights of the epoch that was best on the validation images; the next column is on the "
        "validation images with the weights that the run ended with. Parameters are those that are "
        "trained, MACs multiply-accumulates per image (GMACs are 10^9). Images/s are of training "
        "steps without validation, the median over the run's log lines, and in brackets the range "
        "of half of the steps: runs whose ranges overlap cannot be told apart. The column after it "
        "compares with the first row. Training time is that of all training steps."
    ]
    if any(result.tested is not None and result.test_is_validation for _, result in known):
        notes.append(
            "The data has no test images of its own. The best epoch was chosen on the images that "
            "accuracy is given for, which flatters all runs."
        )
    if any(result.initial is not None for _, result in known):
        notes.append(
            "Before the first step: a run that starts with the weights of another one, on the "
            "validation images before it is fine-tuned."
        )
    if any(len(result.phases) > 1 for _, result in known):
        notes.append(
            "Two figures, one then the other: before and after structured layers became dense."
        )
    notes += [
        f"The best epoch of {entry.name} was before its layers became dense: its accuracy is that "
        "of structured layers."
        for entry, result in known
        if result.best_before_switch
    ]
    slow = [
        f"{entry.name} {100 * result.waiting:.0f} %"
        for entry, result in known
        if result.waiting > _MUCH_WAITING
    ]
    if slow:
        notes.append(
            f"Of the training time this much was waiting for images: {', '.join(slow)}. More of "
            "datamodule.num_workers may help; images/s say little of the models."
        )
    spread = [
        f"{entry.name} {low:.4g} to {high:.4g}"
        for entry, result in known
        for low, high in _spread(result)
    ]
    if spread:
        notes.append(
            "The machine did not go at one speed all the time, as if it had other work. Half of "
            f"the steps were at these images/s: {', '.join(spread)}."
        )
    places = dict.fromkeys(entry.where for entry, _ in known)
    notes.append(f"Measured on {'; '.join(places)}.")
    return [line for note in notes for line in (note, "")]


def _spread(results: Results) -> list[tuple[float, float]]:
    """The quartiles of the phases in which they are far apart."""
    return [
        phase.quartiles
        for phase in results.phases
        if phase.quartiles is not None
        and phase.images_per_second
        and phase.quartiles[1] - phase.quartiles[0] > _MUCH_SPREAD * phase.images_per_second
    ]
