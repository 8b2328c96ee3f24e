"""How all pictures of runs look: no display is needed, the same frame, grid and colors.

Matplotlib takes longer to import than all else but oneflow: only what draws imports it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from flow_train.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Where a picture is about one run, the first color is for training, the second for validation.
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def new_figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    return figure


def tidy(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(alpha=0.3, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, output_png: Path | str) -> Path:
    """Write a PNG file, in place of one that is there; returns its path."""
    image = io.BytesIO()
    # Figure.savefig would lay everything out twice.
    figure.canvas.draw()
    Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).save(image, format="png")
    replace_file(Path(output_png), image.getvalue())
    return Path(output_png)
