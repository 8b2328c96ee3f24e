"""A file of results as two pictures: every row (latest.png) and the models alone (models.png).

`python -m benchmarks.chart` draws the newest file again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from benchmarks import results
from benchmarks.items import BATCHES
from benchmarks.results import Row

# Groups with more rows than this are drawn as one bar: the median, with a line to the least.
MOST_BARS = 25
# What the short picture shows, in float32 and bfloat16, and what it calls it.
MODELS = {
    "ResNet50, training": ("ResNet50 train b16", "ResNet50 train b16, bf16"),
    "ViT-S/16, training": ("ViT-S/16 train b8", "ViT-S/16 train b8, bf16"),
    "GPT-2, training": ("GPT-2 train 2x256", "GPT-2 train 2x256, bf16"),
    "Llama, training": ("Llama train 1x1024", "Llama train 1x1024, bf16"),
    "ViT-S with Monarch, training": ("Monarch vit-s train b8", "Monarch vit-s train b8, bf16"),
    "ViTAE-Tiny, training": (
        "dense vitae-tiny train b8, 224 px",
        "dense vitae-tiny train b8, 224 px, bf16",
    ),
    "ResNet50, inference": (
        "ResNet50 inference b8, engines",
        "ResNet50 inference b8 bf16, engines",
    ),
    "ViT-S/16, inference": (
        "ViT-S/16 inference b8, engines",
        "ViT-S/16 inference b8 bf16, engines",
    ),
}
# Where a number stands beside the end of its bar.
_BESIDE: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
COLORS = {"float32": "#1f6feb", "bfloat16": "#8250df"}
PEER, TEXT = "#f0883e", "#57606a"


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw the rows of one file into `latest.png` and `models.png` of a folder."""
    _draw_all(rows, folder / "latest.png")
    _draw_models(rows, folder / "models.png")


def _draw_models(rows: Sequence[Row], path: Path) -> None:
    """Two bars for each model, of one machine, that of the newest row: the fastest peer is 1."""
    measured = [row for row in rows if row.ratio]
    machine = max(measured, key=lambda row: row.date).machine if measured else ""
    found = {row.item: row for row in measured if row.machine == machine}
    names = [name for name, items in MODELS.items() if found.keys() & set(items)][::-1]
    shown = [found[item] for name in names for item in MODELS[name] if item in found]
    figure = Figure((8, 0.5 * len(names) + 1.3), layout="constrained")
    axes = figure.subplots()
    for y, name in enumerate(names):
        for item, shift, color in zip(MODELS[name], (0.2, -0.2), COLORS.values(), strict=True):
            if item not in found:
                axes.annotate("not measured", (0, y + shift), color=TEXT, fontsize=8, **_BESIDE)
                continue
            ratio = float(found[item].ratio)
            axes.barh(y + shift, ratio, height=0.36, color=color)
            said = f"{ratio:.2f}  {found[item].peer}"
            place = (max(ratio, 1.0), y + shift)
            axes.annotate(said, place, color=TEXT, fontsize=9, **_BESIDE)
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.set_ylim(-0.55, len(names) - 0.45)
    axes.set_xlim(0, 1.25 * max([1.0, *(float(row.ratio) for row in shown)]))
    axes.axvline(1, color=PEER, linewidth=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    where = results.origin(shown).replace("; oneflow", "\noneflow") if shown else ""
    axes.set_xlabel(f"times as fast as the fastest peer, named beside each bar\n{where}", size=9)
    axes.xaxis.set_major_locator(MultipleLocator(0.5))
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    handles.append(Line2D([], [], color=PEER, linewidth=2))
    labels = [*COLORS, "the fastest peer"]
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=11)
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
    axes.set_xlabel("speed relative to the fastest peer (bar: ours, gray mark: stock OneFlow)")
    axes.set_title(results.origin(rows).replace("; ", "\n"), fontsize=8)
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
