"""The runs of a study as one Markdown page (a table, and what one needs to know to read it) and
as one picture: accuracy by epoch, and bars of what the table has."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from flow_train.compare.results import Phase, Results, images_of_accuracy, macs_unit
from flow_train.compare.study import PlannedRun, Study
from flow_train.metrics.console import format_eta
from flow_train.metrics.curves import COLORS, new_figure, save_figure, tidy

# A larger share of waiting than this is worth a sentence: the speed is not the model's then.
_MUCH_WAITING = 0.1
# Half of the steps further apart than this, relative to the median, were not at one speed.
_MUCH_SPREAD = 0.1
_NOTHING = "-"

# The opacity of the second of two bars, which is about the layers after they became dense.
_PALE = 0.45
# The color of what stands for the same in all runs.
_DARK = "#333333"
# How far beyond the longest bar a panel goes: there is room for its number.
_ROOM = 1.4
# Lines let others show through: runs whose curves lie on each other must all be seen.
_STYLES = ("-", "--", "-.", ":")
_SPEED = "Training images/s"


@dataclass(frozen=True)
class Entry:
    """One row. `state` is "done", or why there is nothing to show; `results` is None and `where`
    (device and date of its end) empty where the run is not done."""

    run: PlannedRun
    state: str
    results: Results | None = None
    where: str = ""

    @property
    def name(self) -> str:
        return self.run.row.name


def format_page(study: Study, entries: Sequence[Entry], picture: str | None, module: str) -> str:
    """The page; `picture` is the file that shows the rows, relative to the page, and `module` the
    program that ran them."""
    lines = [f"# {study.title}", "", *_table(entries), ""]
    if picture is not None:
        lines += [f"![{study.title}]({picture})", ""]
    lines += [*_notes(entries), "The runs:", ""]
    for entry in entries:
        command = shlex.join(("python", "-m", module, *entry.run.arguments))
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


def _parameters_drawn(runs: Sequence[Results]) -> tuple[str, Callable[[Phase], float | None]]:
    """Heading and figures, in a unit with digits before the point."""
    known = [phase.parameters for results in runs for phase in results.phases if phase.parameters]
    name, unit = ("thousands", 1e3) if known and min(known) < 1e5 else ("millions", 1e6)
    return (
        f"Trained parameters, {name}",
        lambda phase: None if phase.parameters is None else phase.parameters / unit,
    )


def draw_comparison(runs: Sequence[tuple[str, Results]], title: str, output_png: Path) -> Path:
    """Draw the runs that are done (name and results, at least one); returns `output_png`.

    To the left validation accuracy by epoch, with an upright line where layers became dense. To the
    right bars of accuracy (a diamond marks it before the first step), parameters,
    multiply-accumulates and training speed with the range of half of the steps; where layers became
    dense there are two, the pale one for afterwards. A legend below says so where it occurs.
    """
    figure = new_figure(17, max(4.2, 1.6 + 0.5 * len(runs)), title)
    found = [results for _, results in runs]
    unit, per_unit = macs_unit(found)
    per_phase: list[tuple[str, Callable[[Phase], float | None]]] = [
        _parameters_drawn(found),
        (
            f"{unit} per image",
            lambda phase: None if phase.gmacs is None else phase.gmacs * per_unit,
        ),
        (_SPEED, lambda phase: phase.images_per_second),
    ]
    grid = figure.add_gridspec(1, 2 + len(per_phase), width_ratios=[1.7, *[1] * 4])
    _draw_curves(figure.add_subplot(grid[0]), runs)
    accuracy = figure.add_subplot(grid[1])
    _draw_accuracy(accuracy, found)
    accuracy.set_xlabel(f"on {images_of_accuracy(found)}")
    panels = [(accuracy, "Accuracy, %")]
    for column, (heading, value) in enumerate(per_phase, start=2):
        axes = figure.add_subplot(grid[column])
        ranges = [[p.quartiles if heading == _SPEED else None for p in r.phases] for r in found]
        _draw_bars(axes, [list(map(value, results.phases)) for results in found], ranges)
        panels.append((axes, heading))
    for axes, heading in panels:
        axes.set_title(heading)
        # Put the first run on top.
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.set_yticks(range(len(runs)), [name for name, _ in runs] if axes is accuracy else [])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        tidy(axes, "x")
    marks = _marks(found)
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    return save_figure(figure, output_png)


def _marks(runs: Sequence[Results]) -> list[Artist]:
    switched = any(results.switch_epoch is not None for results in runs)
    marks: list[tuple[bool, Artist]] = [
        (switched, Line2D([], [], color=_DARK, linewidth=0.8, label="layers become dense")),
        (
            any(results.initial is not None for results in runs),
            Line2D([], [], color=_DARK, marker="D", linestyle="", label="before the first step"),
        ),
        (
            any(len(results.phases) > 1 for results in runs),
            Patch(color=_DARK, alpha=_PALE, label="after layers became dense"),
        ),
        (
            any(phase.quartiles for results in runs for phase in results.phases),
            Line2D([], [], color=_DARK, marker="|", label="half of the steps"),
        ),
    ]
    return [artist for is_there, artist in marks if is_there]


def _draw_curves(axes: Axes, runs: Sequence[tuple[str, Results]]) -> None:
    for number, (name, results) in enumerate(runs):
        color, size = _color(number), 4 if len(results.epochs) <= 30 else 2
        axes.plot(
            results.epochs,
            results.validated,
            _STYLES[number % len(_STYLES)],
            marker="o",
            markersize=size,
            color=color,
            label=name,
        )
        if results.switch_epoch is not None:
            axes.axvline(results.switch_epoch, color=color, linewidth=0.8)
    axes.set_title("Validation accuracy")
    axes.set_xlabel("epoch")
    axes.set_ylabel("% of images")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    tidy(axes)
    axes.legend(frameon=False)


def _draw_accuracy(axes: Axes, runs: Sequence[Results]) -> None:
    _draw_bars(axes, [[results.tested] for results in runs])
    for number, results in enumerate(runs):
        if results.initial is not None:
            axes.plot(results.initial, number, marker="D", color=_DARK, markersize=5)


def _draw_bars(
    axes: Axes,
    rows: Sequence[Sequence[float | None]],
    ranges: Sequence[Sequence[tuple[float, float] | None]] | None = None,
) -> None:
    """One bar, or two below each other, for each row; nothing where there is no value. `ranges` are
    drawn as lines along the bars."""
    longest = 0.0
    for number, values in enumerate(rows):
        height = 0.7 / len(values)
        for part, value in enumerate(values):
            if value is None:
                continue
            y = number + (part - (len(values) - 1) / 2) * height
            pale = _PALE if part else 1.0
            axes.barh(y, value, height=0.9 * height, color=_color(number), alpha=pale)
            end, span = value, ranges[number][part] if ranges else None
            if span is not None:
                axes.plot(span, (y, y), color=_DARK, marker="|", markersize=5, linewidth=1)
                end = max(value, span[1])
            longest = max(longest, end)
            axes.annotate(
                _short(value), (end, y), (6, 0), textcoords="offset points", va="center", fontsize=8
            )
    axes.set_xlim(0, _ROOM * longest or 1)


def _short(value: float) -> str:
    """Three or four digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
