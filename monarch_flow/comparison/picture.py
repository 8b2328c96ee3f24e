"""The runs of a study as one picture: accuracy by epoch, and bars of what a table has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from flow_train.metrics.charts import COLORS, new_figure, save_figure, tidy
from monarch_flow.comparison.results import Phase, Results, images_of_accuracy, macs_unit

# Of the second of two bars, which is about the layers after they became dense.
_PALE = 0.45
# Of what stands for the same in all runs.
_DARK = "#333333"
# How far beyond the longest bar a panel goes: there is room for its number.
_ROOM = 1.4
# Runs whose curves lie on each other are to be seen all the same.
_STYLES = ("-", "--", "-.", ":")


def _parameters(runs: Sequence[Results]) -> tuple[str, Callable[[Phase], float | None]]:
    """Heading and figures, in a unit with digits before the point."""
    known = [phase.parameters for results in runs for phase in results.phases if phase.parameters]
    name, unit = ("thousands", 1e3) if known and min(known) < 1e5 else ("millions", 1e6)
    return (
        f"Trained parameters, {name}",
        lambda phase: None if phase.parameters is None else phase.parameters / unit,
    )


_SPEED = "Training images/s"


def draw_comparison(runs: Sequence[tuple[str, Results]], title: str, output_png: Path) -> Path:
    """Draw the runs that are done.

    To the left validation accuracy by epoch, with an upright line where layers became dense. To the
    right bars of accuracy (a diamond marks it before the first step), parameters,
    multiply-accumulates and training speed with the range of half of the steps; where layers became
    dense there are two, the pale one for afterwards. A legend below says so where it occurs.

    Args:
        runs: name and results, at least one.
        title: of the picture.
        output_png: replaced if it exists.

    Returns:
        `output_png`.
    """
    figure = new_figure(17, max(4.2, 1.6 + 0.5 * len(runs)), title)
    found = [results for _, results in runs]
    unit, per_unit = macs_unit(found)
    per_phase: list[tuple[str, Callable[[Phase], float | None]]] = [
        _parameters(found),
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
        # The first run on top.
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.set_yticks(range(len(runs)), [name for name, _ in runs] if axes is accuracy else [])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        tidy(axes, "x")
    marks = _marks(found)
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    return save_figure(figure, output_png)


def _marks(runs: Sequence[Results]) -> list[Artist]:
    """What the legend explains, of what is there."""
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
                _short(value),
                (end, y),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set_xlim(0, _ROOM * longest or 1)


def _short(value: float) -> str:
    """Three or four digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
