"""The runs of a study as one Markdown page (a table, and what one needs to know to read it) and
as one picture: accuracy (of language models perplexity) by epoch, bars of what the table has, and
accuracy beside time and parameters. Where rows have several seeds, a figure is the mean."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from flow_train.compare.results import (
    ACCURACY,
    PERPLEXITY,
    Phase,
    Quality,
    Results,
    data_of_tests,
    macs_unit,
)
from flow_train.compare.rows import DARK, PALE, draw_bars, markdown, ratio, short, spread
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
        return self.run.name


def by_row(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The entries of each row of the study, one for each seed."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.run.row.name, []).append(entry)
    return groups


def done(entries: Sequence[Entry]) -> list[Results]:
    return [entry.results for entry in entries if entry.results is not None]


def format_page(study: Study, entries: Sequence[Entry], picture: str | None, module: str) -> str:
    """The page; `picture` is the file that shows the rows, relative to the page, and `module` the
    program that ran them."""
    parts = [f"# {study.title}", markdown(table(entries))]
    if picture is not None:
        parts.append(f"![{study.title}]({picture})")
    parts += [*_notes(entries), "The runs:"]
    commands = [shlex.join(("python", "-m", module, *entry.run.arguments)) for entry in entries]
    pairs = zip(entries, commands, strict=True)
    parts.append("\n".join(f"- {entry.name}: `{command}`" for entry, command in pairs))
    return "\n\n".join(parts) + "\n"


def table(entries: Sequence[Entry]) -> list[list[str]]:
    """A line for each row of the study, after the heads."""
    known, groups = done(entries), by_row(entries)
    unit, per_unit = macs_unit(known)
    first = done(next(iter(groups.values())))
    baseline = _speed([results.phases[0] for results in first])
    quality, least = _quality(known), _least_seconds(entries)

    def mean(values: Sequence[float | None]) -> str:
        return _mean(values, quality.unit)

    columns: dict[str, Callable[[Sequence[Results]], str]] = {
        quality.name: lambda runs: mean([r.tested for r in runs]),
        f"after the last {quality.along}": lambda runs: mean([r.last for r in runs]),
        f"after {least:.0f} s": lambda runs: mean([r.at(least) for r in runs]),
        "before the first step": lambda runs: mean([r.initial for r in runs]),
        "right tokens": lambda runs: _mean([r.predicted for r in runs], ACCURACY.unit),
        "parameters": _by_phase(lambda phases: _text(phases[0].parameters, "{:,}")),
        unit: _by_phase(
            lambda phases: (
                _NOTHING if phases[0].gmacs is None else short(phases[0].gmacs * per_unit)
            )
        ),
        f"training {quality.samples}/s": _by_phase(_rate),
        "speed": _by_phase(lambda phases: _text(ratio(_speed(phases), baseline), "{:.2f} x")),
        "training time": lambda runs: format_eta(statistics.mean(r.seconds for r in runs)),
    }
    # A column that nothing stands in is left out.
    columns = {
        head: cell for head, cell in columns.items() if any(cell([r]) != _NOTHING for r in known)
    }
    states = [*columns, "state"] if len(known) < len(entries) else [*columns]
    rows = [["run", *states]]
    for name, group in groups.items():
        runs = done(group)
        cells = [cell(runs) if runs else _NOTHING for cell in columns.values()]
        lacking = [entry.state for entry in group if entry.results is None]
        some = f"{len(runs)} of {len(group)} seeds; " if runs else ""
        state = some + lacking[0] if lacking else "done"
        rows.append([name, *cells, state][: 1 + len(states)])
    return rows


def figures(entries: Sequence[Entry]) -> list[list[str]]:
    """A line for each run that is done, after the heads; parameters, GMACs and speed are those
    after the switch, where there is one."""
    quality, least = _quality(done(entries)), _least_seconds(entries)
    name, along = quality.name, quality.along
    values: dict[str, Callable[[Results], float | None]] = {
        name: lambda results: results.tested,
        f"{name}_after_the_last_{along}": lambda results: results.last,
        f"{name}_after_{least:.0f}_seconds": lambda results: results.at(least),
        f"{name}_before_the_first_step": lambda results: results.initial,
        "right_tokens": lambda results: results.predicted,
        "parameters": lambda results: results.phases[-1].parameters,
        "gmacs": lambda results: results.phases[-1].gmacs,
        f"{quality.samples}_per_second": lambda results: results.phases[-1].rate,
        "training_seconds": lambda results: results.seconds,
    }
    rows = [["run", "seed", *values]]
    for entry in entries:
        if entry.results is not None:
            seed = _text(entry.run.seed, "{}", "")
            cells = [_text(value(entry.results), "{}", "") for value in values.values()]
            rows.append([entry.run.row.name, seed, *cells])
    return rows


def _text(value: float | None, form: str, nothing: str = _NOTHING) -> str:
    return nothing if value is None else form.format(value)


def _quality(known: Sequence[Results]) -> Quality:
    return known[0].quality if known else ACCURACY


def _least_seconds(entries: Sequence[Entry]) -> float:
    """Of training that all rows had: the mean of the row that had the least, or 0."""
    rows = [[r.seconds for r in done(group)] for group in by_row(entries).values()]
    return min((statistics.mean(seconds) for seconds in rows if seconds), default=0.0)


def _mean(values: Sequence[float | None], unit: str) -> str:
    """With the standard deviation where there are several."""
    found = spread(values)
    if found is None:
        return _NOTHING
    mean, deviation = found
    return f"{mean:.2f}{_text(deviation, ' ± {:.2f}', '')}{unit}"


def _by_phase(cell: Callable[[Sequence[Phase]], str]) -> Callable[[Sequence[Results]], str]:
    # What does not change at the switch is said once.
    return lambda runs: ", then ".join(dict.fromkeys(map(cell, _phases(runs)))) or _NOTHING


def _phases(runs: Sequence[Results]) -> list[tuple[Phase, ...]]:
    """The first phase of all runs, then the second."""
    return list(zip(*(results.phases for results in runs), strict=False))


def _speed(phases: Sequence[Phase]) -> float | None:
    speeds = [phase.rate for phase in phases if phase.rate]
    return statistics.median(speeds) if speeds else None


def _quartiles(phases: Sequence[Phase]) -> tuple[float, float] | None:
    """The range of half of the steps of each run, from the slowest run's to the fastest one's."""
    found = [phase.quartiles for phase in phases if phase.quartiles]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def _rate(phases: Sequence[Phase]) -> str:
    speed = _speed(phases)
    if speed is None:
        return _NOTHING
    low, high = _quartiles(phases) or (speed, speed)
    return f"{speed:.4g} ({low:.4g} to {high:.4g})"


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
        for speed, (low, high) in ((p.rate, p.quartiles or (0, 0)) for p in results.phases)
        if speed and high - low > _MUCH_SPREAD * speed
    ]
    quality = runs[0].quality
    name, samples, along = quality.name, quality.samples, quality.along
    notes = {
        f"{name.capitalize()} is {quality.said} on {data_of_tests(runs)}, with the weights of the "
        f"{along} that was best on the validation {samples}; the next columns are on the "
        f"validation {samples}, with the weights that the run ended with, and after as many "
        "seconds of training as the shortest row took, between two validations on "
        "the line through them. Parameters are those that are trained, "
        f"MACs multiply-accumulates of one of the {samples} (GMACs are 10^9). "
        f"{samples.capitalize()}/s are of training steps without validation, the median over the "
        "run's log lines, and in brackets the range of half of the steps: runs whose ranges "
        "overlap cannot be told apart. The column after it compares with the first row. Training "
        "time is that of all training steps.": True,
        f"Rows have several seeds: {name} is the mean and, after ±, the standard deviation of the"
        f" sample over them; {samples}/s are the median run's, in brackets the range over all of "
        "them; training time is the mean. comparison.csv has each run.": any(
            entry.run.seed is not None for entry, _ in known
        ),
        f"The data has no test {samples} of its own. The best {along} was chosen on the {samples} "
        f"that {name} is given for, which flatters all runs.": any(
            results.tested is not None and results.test_is_validation for results in runs
        ),
        "Before the first step: a run that starts with the weights of another one, on the "
        f"validation {samples} before it is fine-tuned.": any(
            results.initial is not None for results in runs
        ),
        "Two figures, one then the other: before and after structured layers became dense.": any(
            len(results.phases) > 1 for results in runs
        ),
        **{
            f"The best {along} of {run} was before its layers became dense: its {name} is that "
            "of structured layers.": True
            for run in early
        },
        f"Of the training time this much was waiting for {samples}: {', '.join(slow)}. More "
        f"workers for the data may help; {samples}/s say little of the models.": bool(slow),
        "The machine did not go at one speed all the time, as if it had other work. Half of "
        f"the steps were at these {samples}/s: {', '.join(spread)}.": bool(spread),
        f"Measured on {'; '.join(dict.fromkeys(entry.where for entry, _ in known))}.": True,
    }
    return [note for note, applies in notes.items() if applies]


def draw_comparison(rows: Mapping[str, Sequence[Results]], title: str, output_png: Path) -> Path:
    """Draw the rows by name, each with its runs that are done, at least one; returns `output_png`.

    Above, to the left validation accuracy (or perplexity) by epoch, with an upright line where
    layers became dense. To the right bars of accuracy (a diamond marks it before the first step),
    parameters, multiply-accumulates and training speed with the range of half of the steps; where
    layers became dense there are two, the pale one for afterwards. Below accuracy by training time
    and by parameters, a point for each run. A legend says what marks mean, where they occur.
    """
    figure = new_figure(17, max(4.2, 1.6 + 0.5 * len(rows)) + 3.2, title)
    found = [results for runs in rows.values() for results in runs]
    quality = found[0].quality
    parts = figure.add_gridspec(2, 1, height_ratios=[max(2.6, 0.5 * len(rows)), 3.2])
    grid = parts[0].subgridspec(1, 5, width_ratios=[1.7, *[1] * 4])
    _draw_curves(figure.add_subplot(grid[0]), rows)
    accuracy = figure.add_subplot(grid[1])
    tested = [spread([results.tested for results in runs]) for runs in rows.values()]
    initial = [spread([results.initial for results in runs]) for runs in rows.values()]
    marks = [a and a[0] for a in initial]
    around = [[None if a is None or a[1] is None else (a[0] - a[1], a[0] + a[1])] for a in tested]
    draw_bars(accuracy, [[a and a[0]] for a in tested], ranges=around, marks=marks)
    accuracy.set_xlabel(f"on {data_of_tests(found)}")
    speed = f"Training {quality.samples}/s"
    panels = {_title(quality): accuracy}
    unit, per_unit = macs_unit(found)
    sizes = [phase.parameters for results in found for phase in results.phases if phase.parameters]
    name, size = ("thousands", 1e3) if sizes and min(sizes) < 1e5 else ("millions", 1e6)
    trained = f"Trained parameters, {name}"
    values: dict[str, Callable[[Sequence[Phase]], float | None]] = {
        trained: lambda phases: ratio(phases[0].parameters, size),
        f"{unit} per {quality.samples[:-1]}": lambda phases: ratio(phases[0].gmacs, 1 / per_unit),
        speed: _speed,
    }
    for column, (heading, value) in enumerate(values.items(), start=2):
        panels[heading] = axes = figure.add_subplot(grid[column])
        phases = [_phases(runs) for runs in rows.values()]
        ranges = [[_quartiles(p) if heading == speed else None for p in row] for row in phases]
        draw_bars(axes, [list(map(value, row)) for row in phases], ranges=ranges)
    for heading, axes in panels.items():
        axes.set_title(heading)
        axes.set_yticks(range(len(rows)), list(rows) if axes is accuracy else [])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    below = parts[1].subgridspec(1, 2)
    places: dict[str, Callable[[Results], float | None]] = {
        "Training time, s": lambda results: results.seconds,
        trained: lambda results: ratio(results.phases[-1].parameters, size),
    }
    for column, (heading, place) in enumerate(places.items()):
        _draw_points(figure.add_subplot(below[column]), rows, place, heading)
    handles = _legend(found, len(found) > len(rows))
    if handles:
        where = "outside lower center"
        figure.legend(handles=handles, loc=where, ncols=len(handles), frameon=False)
    return save_figure(figure, output_png)


def _title(quality: Quality) -> str:
    return f"{quality.name.capitalize()}, %" if quality.unit else quality.name.capitalize()


def _draw_points(
    axes: Axes,
    rows: Mapping[str, Sequence[Results]],
    place: Callable[[Results], float | None],
    heading: str,
) -> None:
    found = [results for runs in rows.values() for results in runs]
    for number, runs in enumerate(rows.values()):
        color = COLORS[number % len(COLORS)]
        # matplotlib leaves out what is NaN.
        places = [math.nan if (x := place(results)) is None else x for results in runs]
        heights = [math.nan if results.tested is None else results.tested for results in runs]
        axes.plot(places, heights, "o", color=color)
    axes.set(xlabel=heading, ylabel=_title(found[0].quality))
    axes.set_xlim(left=0)
    tidy(axes)


def _legend(runs: Sequence[Results], several: bool) -> list[Artist]:
    """What is to be said of the marks that occur."""
    phases = [phase for results in runs for phase in results.phases]
    name = runs[0].quality.name
    also = f", and of {name} the standard deviation over seeds" if several else ""
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
            Line2D([], [], color=DARK, marker="|", label=f"half of the steps{also}"),
        ),
    ]
    return [artist for occurs, artist in artists if occurs]


def _draw_curves(axes: Axes, rows: Mapping[str, Sequence[Results]]) -> None:
    runs = [(n, name, results) for n, (name, each) in enumerate(rows.items()) for results in each]
    for number, name, results in runs:
        color, size = COLORS[number % len(COLORS)], 4 if len(results.epochs) <= 30 else 2
        axes.plot(
            results.epochs,
            results.validated,
            _STYLES[number % len(_STYLES)],
            marker="o",
            markersize=size,
            color=color,
            label=name if results is rows[name][0] else None,
        )
        if results.switch_epoch is not None:
            axes.axvline(results.switch_epoch, color=color, linewidth=0.8)
    quality = runs[0][2].quality
    axes.set_title(f"Validation {quality.name}")
    axes.set_xlabel(quality.along)
    axes.set_ylabel(_title(quality))
    axes.set_xlim(left=0)
    if quality is PERPLEXITY:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    tidy(axes)
    axes.legend(frameon=False)
