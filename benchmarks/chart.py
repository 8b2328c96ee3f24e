"""A file of results as a picture: how many times the peer's speed, ours and stock OneFlow's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from benchmarks import results
from benchmarks.items import BATCHES
from benchmarks.results import Row

# Groups with more rows than this are drawn as one bar: the median, with a line to the least.
MOST_BARS = 25


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a horizontal bar for each row that has a peer, on a logarithmic axis.

    Args:
        rows: of one file.
        path: a PNG file.
    """
    # The sweep over batch sizes has a picture of its own.
    bars = _bars([row for row in rows if row.ratio and not row.against and row.group != BATCHES])
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(8, 0.24 * len(bars) + 1.2), layout="constrained")
    for y, (_name, ours, least, stock) in enumerate(reversed(bars)):
        axes.barh(y, ours - 1, left=1, height=0.7, color="tab:blue" if ours >= 1 else "tab:red")
        if least < ours:
            axes.plot([least, ours], [y, y], color="black", linewidth=1)
        if stock is not None:
            axes.plot(stock, y, marker="|", color="gray", markersize=9, linestyle="none")
        axes.annotate(
            f"{ours:.2f}",
            (max(ours, 1), y),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(bars)), [bar[0] for bar in reversed(bars)], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlabel("speed relative to PyTorch (bar: ours, gray mark: stock OneFlow)")
    axes.set_title(results.origin(rows), fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(rows: Sequence[Row]) -> list[tuple[str, float, float, float | None]]:
    """(name, ratio, least ratio, stock's ratio) of each bar."""
    bars = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        if len(members) > MOST_BARS:
            ratios = [float(row.ratio) for row in members]
            stock = [float(row.stock_ratio) for row in members if row.stock_ratio]
            name = f"{group}: median of {len(members)}"
            middle = statistics.median(stock) if stock else None
            bars.append((name, statistics.median(ratios), min(ratios), middle))
            continue
        for row in members:
            stock_ratio = float(row.stock_ratio) if row.stock_ratio else None
            bars.append((row.item, float(row.ratio), float(row.ratio), stock_ratio))
    return bars
