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


def draw_comparison(runs: Sequence[tuple[str, Results]], title: str, output_png: Path) -> Path:
    """Draw the runs that are done.

    To the left validation accuracy by epoch, with a dashed line where layers became dense. To the
    right bars of accuracy (a diamond marks it before the first step), parameters and training
    speed; where layers became dense there are two, the pale one for afterwards.

    Args:
        runs: name and results, at least one.
        title: of the picture.
        output_png: replaced if it exists.

    Returns:
        `output_png`.
    """
    figure = new_figure(14, max(3.6, 1.6 + 0.5 * len(runs)), title)
    grid = figure.add_gridspec(1, 4, width_ratios=[1.7, 1, 1, 1])
    _draw_curves(figure.add_subplot(grid[0]), runs)
    accuracy, parameters, speed = (figure.add_subplot(grid[column]) for column in (1, 2, 3))
    _draw_accuracy(accuracy, [results for _, results in runs])
    _draw_bars(
        parameters,
        [_per_phase(results, lambda phase: phase.parameters, 1e-6) for _, results in runs],
    )
    _draw_bars(
        speed, [_per_phase(results, lambda phase: phase.images_per_second) for _, results in runs]
    )
    for axes, heading in (
        (accuracy, "Accuracy, %"),
        (parameters, "Trained parameters, millions"),
        (speed, "Training images/s"),
    ):
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
            results.epochs, results.validated, marker="o", markersize=size, color=color, label=name
        )
        if results.switch_epoch is not None:
            axes.axvline(results.switch_epoch, color=color, linestyle="--", linewidth=0.8)
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
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )


def _per_phase(
    results: Results, value: Callable[[Phase], float | None], scale: float = 1.0
) -> list[float | None]:
    values = [value(phase) for phase in results.phases]
    return [None if number is None else number * scale for number in values]


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
