"""Pictures of runs, drawn without a display, with the same frame, grid and colors; and the one of a
run's metric log: loss, perplexity or accuracy, learning rate.

Matplotlib takes longer to import than all else but oneflow: only what draws imports it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oneflow_accel import settings
from oneflow_accel.errors import UserError

import numpy as np
from PIL import Image

from flow_train.files import replace_file
from flow_train.metrics.log import metric_series, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Where a picture is about one run, the first color is for training, the second for validation.
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def new_figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    return figure


def tidy(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(alpha=0.3, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, output_png: Path | str) -> Path:
    """Write a PNG file, in place of one that is there; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    # Figure.savefig would lay everything out twice.
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).save(image, format="png")
    replace_file(Path(output_png), image.getvalue())
    return Path(output_png)


_TRAIN_COLOR, _VAL_COLOR = COLORS[:2]
_LINE_STYLES = ("-", "--")
# The smooth training curve is a moving average over this share of the points.
_SMOOTHING = 0.05

# Title, label of the y axis, and the logged values that the panel shows, with their legend text.
_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss", "loss", {"loss": ""}),
    ("Perplexity", "perplexity", {"perplexity": ""}),
    ("Accuracy", "% of images", {"acc1": " top-1", "acc5": " top-5"}),
    ("Learning rate", "learning rate", {"lr": ""}),
)


def draw_curves(metrics_jsonl: Path | str, output_png: Path | str) -> Path | None:
    """Draw the curves of a metrics.jsonl; returns `output_png`, or None where the environment has
    FLOW_TRAIN_CURVES=off. UserError if there is nothing to draw."""
    if settings.CURVES.get() == "off":
        return None
    path = Path(metrics_jsonl)
    try:
        lines = read_metrics(path)
    except FileNotFoundError as error:
        raise UserError(f"no curves: there is no metric log at {path}") from error
    return draw_metrics(lines, output_png, source=path)


def draw_metrics(lines: list[dict[str, Any]], output_png: Path | str, *, source: Path) -> Path:
    """Draw the curves of a run from `read_metrics`' lines; returns `output_png`.

    A panel is drawn for what was logged: `loss`; `perplexity`; `acc1` and `acc5`, in percent; `lr`.
    Training values are shown as logged (faint) and smoothed, validation values as points. The
    folder of the log `source` is the title. UserError if there is nothing to draw.
    """
    logged = {name for line in lines for name, value in line["values"].items() if value is not None}
    panels = [panel for panel in _PANELS if logged & panel[2].keys()]
    if not panels:
        raise UserError(f"no curves: {source} holds no loss, accuracy or learning rate")
    figure = new_figure(5.5 * len(panels), 4.2, source.resolve().parent.name)
    for position, (title, unit, names) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        _draw_panel(axes, lines, names)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
    return save_figure(figure, output_png)


def _draw_panel(axes: Axes, lines: list[dict[str, Any]], names: dict[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    tops = []
    for (name, text), style in zip(names.items(), _LINE_STYLES, strict=False):
        steps, values = metric_series(lines, "train", name)
        if len(steps):
            # The learning rate is not measured: smoothing would only blur its steps.
            smooth = values if name == "lr" else smoothed(values)
            if not np.array_equal(smooth, values):
                axes.plot(steps, values, style, color=_TRAIN_COLOR, alpha=0.25, linewidth=0.8)
            marker = "o" if len(steps) == 1 else ""
            axes.plot(steps, smooth, style, marker=marker, color=_TRAIN_COLOR, label=f"train{text}")
            tops += [smooth.max(), np.percentile(values, 98)]
        steps, values = metric_series(lines, "val", name)
        if len(steps):
            size = 4 if len(steps) <= 30 else 2
            axes.plot(
                steps,
                values,
                style,
                marker="o",
                markersize=size,
                color=_VAL_COLOR,
                label=f"validation{text}",
            )
            tops.append(values.max())
    if "perplexity" in names:
        # Perplexity falls from the size of the vocabulary by orders of magnitude.
        axes.set_yscale("log")
        _tick_log(axes)
    else:
        # The axis begins at 0, and is high enough for all but single wild training values.
        axes.set_ylim(0, max(tops, default=1.0) * 1.05 or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    tidy(axes)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False)


def _tick_log(axes: Axes) -> None:
    """Several numbers on a logarithmic axis, even where it does not span two powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    short = high < 8 * low
    locator = MaxNLocator(nbins=6) if short else LogLocator(subs=(1.0, 2.0, 5.0), numticks=20)
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centered moving average; at both ends over the part of the window that there is."""
    half = int(len(values) * _SMOOTHING / 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    stop = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[stop] - sums[first]) / (stop - first)
