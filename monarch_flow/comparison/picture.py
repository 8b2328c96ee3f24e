"""The runs of a study as one picture: accuracy by epoch, and bars of what a table has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from oneflow_accel.training.charts import COLORS, new_figure, save_figure, tidy

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from monarch_flow.comparison.results import Phase, Results

# Of the second of two bars, which is about the layers after they became dense.
_PALE = 0.45
# Runs whose curves lie on each other are to be seen all the same.
_STYLES = ("-", "--", "-.", ":")


def _millions(phase: Phase) -> float | None:
    return None if phase.parameters is None else phase.parameters / 1e6


_PER_PHASE: tuple[tuple[str, Callable[[Phase], float | None]], ...] = (
    ("Trained parameters, millions", _millions),
    ("GMACs per image", lambda phase: phase.gmacs),
    ("Training images/s", lambda phase: phase.images_per_second),
)


def draw_comparison(runs: Sequence[tuple[str, Results]], title: str, output_png: Path) -> Path:
    """Draw the runs that are done.

    To the left validation accuracy by epoch, with an upright line where layers became dense. To the
    right bars of accuracy (a diamond marks it before the first step), parameters,
    multiply-accumulates and training speed; where layers became dense there are two, the pale one
    for afterwards.

    Args:
        runs: name and results, at least one.
        title: of the picture.
        output_png: replaced if it exists.

    Returns:
        `output_png`.
    """
    figure = new_figure(17, max(4.2, 1.6 + 0.5 * len(runs)), title)
    grid = figure.add_gridspec(1, 2 + len(_PER_PHASE), width_ratios=[1.7, *[1] * 4])
    _draw_curves(figure.add_subplot(grid[0]), runs)
    accuracy = figure.add_subplot(grid[1])
    _draw_accuracy(accuracy, [results for _, results in runs])
    panels = [(accuracy, "Accuracy, %")]
    for column, (heading, value) in enumerate(_PER_PHASE, start=2):
        axes = figure.add_subplot(grid[column])
        _draw_bars(axes, [list(map(value, results.phases)) for _, results in runs])
        panels.append((axes, heading))
    for axes, heading in panels:
        axes.set_title(heading)
        # The first run on top.
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.set_yticks(range(len(runs)), [name for name, _ in runs] if axes is accuracy else [])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.margins(x=0.22)
        tidy(axes, "x")
    return save_figure(figure, output_png)


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
            axes.plot(results.initial, number, marker="D", color="black", markersize=5)


def _draw_bars(axes: Axes, rows: Sequence[Sequence[float | None]]) -> None:
    """One bar, or two below each other, for each row; nothing where there is no value."""
    for number, values in enumerate(rows):
        height = 0.7 / len(values)
        for part, value in enumerate(values):
            if value is None:
                continue
            y = number + (part - (len(values) - 1) / 2) * height
            pale = _PALE if part else 1.0
            axes.barh(y, value, height=0.9 * height, color=_color(number), alpha=pale)
            axes.annotate(
                f"{value:.4g}",
                (value, y),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
