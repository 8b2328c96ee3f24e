"""A file of results as two pictures: every row (latest.png) and the models alone (models.png).

`python -m benchmarks.chart` draws the newest file again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from benchmarks import results
from benchmarks.items import BATCHES
from benchmarks.results import Row

# Groups with more rows than this are drawn as one bar: the median, with a line to the least.
MOST_BARS = 25
# What the short picture shows of a file, and what it calls it.
MODELS = {
    "ResNet50 inference b8": "ResNet50, inference",
    "ResNet50 train b16": "ResNet50, training",
    "ViT-S/16 inference b8": "ViT-S/16, inference",
    "ViT-S/16 train b8": "ViT-S/16, training",
    "GPT-2 forward 2x256": "GPT-2, forward",
    "GPT-2 train 2x256": "GPT-2, training",
    "GPT-2 greedy b1, 64 new tokens": "GPT-2, one text",
    "GPT-2 greedy b8, 64 new tokens": "GPT-2, eight texts",
    "dense vitae-tiny train b8, 224 px": "ViTAE-Tiny, training",
    "Monarch vit-s train b8": "ViT-S with Monarch, training",
}
# Where a number stands beside the end of its bar.
_BESIDE: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
OURS, PEER, STOCK = "#1f6feb", "#f0883e", "#8c959f"


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw the rows of one file into `latest.png` and `models.png` of a folder."""
    _draw_all(rows, folder / "latest.png")
    found = {row.item: row for row in rows if row.ratio}
    _draw_models([found[item] for item in MODELS if item in found], folder / "models.png")


def _draw_models(rows: Sequence[Row], path: Path) -> None:
    """Three bars for each model on a linear axis: PyTorch is 1."""
    figure = Figure((8, 0.56 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(reversed(rows)):
        bars = ((0.27, row.ratio, OURS), (0.0, "1", PEER), (-0.27, row.stock_ratio, STOCK))
        for shift, text, color in bars:
            if text:
                axes.barh(y + shift, float(text), height=0.25, color=color)
            if text != "1":
                said, size = (f"{float(text):.2f}", 10) if text else ("not measured", 8)
                place = (float(text or 0), y + shift)
                weight = "bold" if color == OURS else "normal"
                style = {"fontsize": size, "weight": weight, **_BESIDE}
                axes.annotate(said, place, color=color if color == OURS else "#57606a", **style)
    names = [MODELS[row.item] for row in reversed(rows)]
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.set_ylim(-0.55, len(rows) - 0.45)
    axes.set_xlim(0, 1.12 * max([1.0, *(float(row.ratio) for row in rows)]))
    axes.axvline(1, color=PEER, linewidth=1, linestyle=":")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    where = results.origin(rows).replace("; oneflow", "\noneflow") if rows else ""
    axes.set_xlabel(f"speed relative to PyTorch on a CPU, longer is faster\n{where}", size=9)
    axes.xaxis.set_major_locator(MultipleLocator(0.5))
    colors = {"OneFlow with this": OURS, "PyTorch, eager": PEER, "OneFlow without this": STOCK}
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside upper center", ncols=3, frameon=False, fontsize=11)
    figure.savefig(path, dpi=160)


def _draw_all(rows: Sequence[Row], path: Path) -> None:
    """A horizontal bar for each row that has a peer, on a logarithmic axis."""
    # The sweep over batch sizes has a picture of its own.
    bars = _bars([row for row in rows if row.ratio and not row.against and row.group != BATCHES])
    figure = Figure((8, 0.24 * len(bars) + 1.2), layout="constrained")
    axes = figure.subplots()
    for y, (_name, ours, least, stock) in enumerate(reversed(bars)):
        axes.barh(y, ours - 1, left=1, height=0.7, color="tab:blue" if ours >= 1 else "tab:red")
        if least < ours:
            axes.plot([least, ours], [y, y], color="black", linewidth=1)
        if stock is not None:
            axes.plot(stock, y, marker="|", color="gray", markersize=9, linestyle="none")
        axes.annotate(f"{ours:.2f}", (max(ours, 1), y), fontsize=7, **_BESIDE)
    axes.set_yticks(range(len(bars)), [bar[0] for bar in reversed(bars)], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlabel("speed relative to PyTorch (bar: ours, gray mark: stock OneFlow)")
    axes.set_title(results.origin(rows), fontsize=8)
    figure.savefig(path, dpi=110)


def _bars(rows: Sequence[Row]) -> list[tuple[str, float, float, float | None]]:
    """(name, ratio, least ratio, stock's ratio) of each bar."""
    bars = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        ratios = [float(row.ratio) for row in members]
        stock = [float(row.stock_ratio) if row.stock_ratio else None for row in members]
        if len(members) > MOST_BARS:
            known = [ratio for ratio in stock if ratio is not None]
            middle = statistics.median(known) if known else None
            name = f"{group}: median of {len(members)}"
            bars.append((name, statistics.median(ratios), min(ratios), middle))
        else:
            names = [row.item for row in members]
            bars += zip(names, ratios, ratios, stock, strict=True)
    return bars


if __name__ == "__main__":
    newest = results.last_file()
    assert newest is not None, "benchmarks/results has no file: run `make bench` first"
    draw(results.read(newest), results.FOLDER)
