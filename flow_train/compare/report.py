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
from flow_train.compare.rows import DARK, PALE, draw_bars, markdown, ratio, short
from flow_train.compare.study import PlannedRun, Study
from flow_train.metrics.console import format_eta
from flow_train.metrics.curves import COLORS, new_figure, save_figure, tidy

# A larger share of waiting than this is worth a sentence: the speed is not the model's then.
_MUCH_WAITING = 0.1
# Half of the steps further apart than this, relative to the median, were not at one speed.
_MUCH_SPREAD = 0.1
_NOTHING = "-"
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
    parts = [f"# {study.title}", _table(entries)]
    if picture is not None:
        parts.append(f"![{study.title}]({picture})")
    parts += [*_notes(entries), "The runs:"]
    commands = [shlex.join(("python", "-m", module, *entry.run.arguments)) for entry in entries]
    pairs = zip(entries, commands, strict=True)
    parts.append("\n".join(f"- {entry.name}: `{command}`" for entry, command in pairs))
    return "\n\n".join(parts) + "\n"


def _table(entries: Sequence[Entry]) -> str:
    known = [entry.results for entry in entries if entry.results is not None]
    unit, per_unit = macs_unit(known)
    first = entries[0].results
    baseline = None if first is None else first.phases[0].images_per_second
    columns: dict[str, Callable[[Results], str]] = {
        "accuracy": lambda results: _text(results.tested, "{:.2f} %"),
        "after the last epoch": lambda results: _text(results.last, "{:.2f} %"),
        "before the first step": lambda results: _text(results.initial, "{:.2f} %"),
        "parameters": _by_phase(lambda phase: _text(phase.parameters, "{:,}")),
        unit: _by_phase(
            lambda phase: _NOTHING if phase.gmacs is None else short(phase.gmacs * per_unit)
        ),
        "training images/s": _by_phase(_images_per_second),
        "speed": _by_phase(
            lambda phase: _text(ratio(phase.images_per_second, baseline), "{:.2f} x")
        ),
        "training time": lambda results: format_eta(results.seconds),
    }
    # A column that nothing stands in is left out.
    columns = {
        head: cell for head, cell in columns.items() if any(cell(r) != _NOTHING for r in known)
    }
    if len(known) < len(entries):
        columns["state"] = lambda results: "done"
    rows = [["run", *columns]]
    for entry in entries:
        if entry.results is None:
            rows.append([entry.name, *[_NOTHING] * (len(columns) - 1), entry.state])
        else:
            rows.append([entry.name, *(cell(entry.results) for cell in columns.values())])
    return markdown(rows)


def _text(value: float | None, form: str) -> str:
    return _NOTHING if value is None else form.format(value)


def _by_phase(cell: Callable[[Phase], str]) -> Callable[[Results], str]:
    # What does not change at the switch is said once.
    return lambda results: ", then ".join(dict.fromkeys(map(cell, results.phases))) or _NOTHING


def _images_per_second(phase: Phase) -> str:
    if phase.images_per_second is None:
        return _NOTHING
    low, high = phase.quartiles or (phase.images_per_second,) * 2
    return f"{phase.images_per_second:.4g} ({low:.4g} to {high:.4g})"


def _notes(entries: Sequence[Entry]) -> list[str]:
    known = [(entry, entry.results) for entry in entries if entry.results is not None]
    if not known:
        return []
    runs = [results for _, results in known]
    early = [entry.name for entry, results in known if results.best_before_switch]
    slow = [
        f"{entry.name} {100 * results.waiting:.0f} %"
        for entry, results in known
        if results.waiting > _MUCH_WAITING
    ]
    spread = [
        f"{entry.name} {low:.4g} to {high:.4g}"
        for entry, results in known
        for speed, (low, high) in (
            (p.images_per_second, p.quartiles or (0, 0)) for p in results.phases
        )
        if speed and high - low > _MUCH_SPREAD * speed
    ]
    notes = {
        f"Accuracy is top-1 on {images_of_accuracy(runs)}, with the "
        "weights of the epoch that was best on the validation images; the next column is on the "
        "validation images with the weights that the run ended with. Parameters are those that are "
        "trained, MACs multiply-accumulates per image (GMACs are 10^9). Images/s are of training "
        "steps without validation, the median over the run's log lines, and in brackets the range "
        "of half of the steps: runs whose ranges overlap cannot be told apart. The column after it "
        "compares with the first row. Training time is that of all training steps.": True,
        "The data has no test images of its own. The best epoch was chosen on the images that "
        "accuracy is given for, which flatters all runs.": any(
            results.tested is not None and results.test_is_validation for results in runs
        ),
        "Before the first step: a run that starts with the weights of another one, on the "
        "validation images before it is fine-tuned.": any(
            results.initial is not None for results in runs
        ),
        "Two figures, one then the other: before and after structured layers became dense.": any(
            len(results.phases) > 1 for results in runs
        ),
        **{
            f"The best epoch of {name} was before its layers became dense: its accuracy is that "
            "of structured layers.": True
            for name in early
        },
        f"Of the training time this much was waiting for images: {', '.join(slow)}. More of "
        "datamodule.num_workers may help; images/s say little of the models.": bool(slow),
        "The machine did not go at one speed all the time, as if it had other work. Half of "
        f"the steps were at these images/s: {', '.join(spread)}.": bool(spread),
        f"Measured on {'; '.join(dict.fromkeys(entry.where for entry, _ in known))}.": True,
    }
    return [note for note, applies in notes.items() if applies]


def draw_comparison(runs: Sequence[tuple[str, Results]], title: str, output_png: Path) -> Path:
    """Draw the runs that are done (name and results, at least one); returns `output_png`.

    To the left validation accuracy by epoch, with an upright line where layers became dense. To the
    right bars of accuracy (a diamond marks it before the first step), parameters,
    multiply-accumulates and training speed with the range of half of the steps; where layers became
    dense there are two, the pale one for afterwards. A legend below says so where it occurs.
    """
    figure = new_figure(17, max(4.2, 1.6 + 0.5 * len(runs)), title)
    found = [results for _, results in runs]
    grid = figure.add_gridspec(1, 5, width_ratios=[1.7, *[1] * 4])
    _draw_curves(figure.add_subplot(grid[0]), runs)
    accuracy = figure.add_subplot(grid[1])
    marks = [results.initial for results in found]
    draw_bars(accuracy, [[results.tested] for results in found], marks=marks)
    accuracy.set_xlabel(f"on {images_of_accuracy(found)}")
    panels = {"Accuracy, %": accuracy}
    unit, per_unit = macs_unit(found)
    sizes = [phase.parameters for results in found for phase in results.phases if phase.parameters]
    name, size = ("thousands", 1e3) if sizes and min(sizes) < 1e5 else ("millions", 1e6)
    values: dict[str, Callable[[Phase], float | None]] = {
        f"Trained parameters, {name}": lambda phase: ratio(phase.parameters, size),
        f"{unit} per image": lambda phase: ratio(phase.gmacs, 1 / per_unit),
        _SPEED: lambda phase: phase.images_per_second,
    }
    for column, (heading, value) in enumerate(values.items(), start=2):
        panels[heading] = axes = figure.add_subplot(grid[column])
        ranges = [[p.quartiles if heading == _SPEED else None for p in r.phases] for r in found]
        draw_bars(axes, [list(map(value, results.phases)) for results in found], ranges=ranges)
    for heading, axes in panels.items():
        axes.set_title(heading)
        axes.set_yticks(range(len(runs)), [name for name, _ in runs] if axes is accuracy else [])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    handles = _legend(found)
    if handles:
        place = "outside lower center"
        figure.legend(handles=handles, loc=place, ncols=len(handles), frameon=False)
    return save_figure(figure, output_png)


def _legend(runs: Sequence[Results]) -> list[Artist]:
    """What is to be said of the marks that occur."""
    phases = [phase for results in runs for phase in results.phases]
    artists: list[tuple[bool, Artist]] = [
        (
            any(results.switch_epoch is not None for results in runs),
            Line2D([], [], color=DARK, linewidth=0.8, label="layers become dense"),
        ),
        (
            any(results.initial is not None for results in runs),
            Line2D([], [], color=DARK, marker="D", linestyle="", label="before the first step"),
        ),
        (
            len(phases) > len(runs),
            Patch(color=DARK, alpha=PALE, label="after layers became dense"),
        ),
        (
            any(phase.quartiles for phase in phases),
            Line2D([], [], color=DARK, marker="|", label="half of the steps"),
        ),
    ]
    return [artist for occurs, artist in artists if occurs]


def _draw_curves(axes: Axes, runs: Sequence[tuple[str, Results]]) -> None:
    for number, (name, results) in enumerate(runs):
        color, size = COLORS[number % len(COLORS)], 4 if len(results.epochs) <= 30 else 2
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
