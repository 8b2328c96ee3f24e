"""Rows that are compared: measured in turns, as the speed of a machine that does other work changes
from one minute to the next; their medians, and the rows as a table and as bars."""

from __future__ import annotations

import csv
import io
import statistics
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from flow_train.files import replace_file
from flow_train.metrics.curves import COLORS, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = TypeVar("Row", bound=Hashable)
Found = TypeVar("Found")

# The opacity of the second of two bars.
PALE = 0.45
# The color of what stands for the same in all rows.
DARK = "#333333"
_BESIDE: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8}
# How far beyond the longest bar a panel goes: there is room for its number.
_ROOM = 1.4


def in_turns(
    rows: Iterable[Row], rounds: int, measure: Callable[[Row], Found]
) -> dict[Row, list[Found]]:
    """What `measure` finds of each row, once a round; in a round every row has its turn."""
    found: dict[Row, list[Found]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, results in found.items():
            results.append(measure(row))
    return found


def timed(part: Callable[[], Found], synchronize: Callable[[], object]) -> tuple[Found, float]:
    """What `part` returns, and its seconds until the device has done it."""
    synchronize()
    start = time.perf_counter()
    result = part()
    synchronize()
    return result, time.perf_counter() - start


def medians(runs: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Of each figure of several runs."""
    return tuple(statistics.median(values) for values in zip(*runs, strict=True))


def ratio(value: float | None, base: float | None) -> float | None:
    """None where there is nothing to divide, or to divide by."""
    return value / base if value is not None and base else None


def show(
    title: str, rows: Sequence[Sequence[str]], left: Collection[str] | None = None, width: int = 140
) -> None:
    """Print a table, its heads the first of `rows`; the columns of `left` (the first one, where
    none is named) are flush left. Away from a terminal it is as wide as `width`."""
    heads, *body = rows
    table = Table(title=title)
    for head in heads:
        is_left = head in (heads[:1] if left is None else left)
        table.add_column(head, justify="left" if is_left else "right")
    for cells in body:
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else width).print(table)


def line(cells: Iterable[str]) -> str:
    """A line of a table of Markdown."""
    return f"| {' | '.join(cells)} |"


def markdown(
    rows: Sequence[Sequence[str]], left: Collection[str] | None = None, padded: bool = False
) -> str:
    """A table of Markdown, as `show` takes it; the columns of a `padded` one stand below each other
    as text, too."""
    columns = []
    for head, *cells in zip(*rows, strict=True):
        is_left = head in (rows[0][:1] if left is None else left)
        width = max(map(len, [head, *cells])) if padded else 0
        rule = "-" * max(width, 3) if is_left else f"{'-' * (max(width, 4) - 1)}:"
        columns.append(
            [f"{cell:{'<' if is_left else '>'}{width}}" for cell in (head, rule, *cells)]
        )
    return "\n".join(map(line, zip(*columns, strict=True)))


def latex(rows: Sequence[Sequence[str]]) -> str:
    """A table of LaTeX, with the rules of its package booktabs, the first of `rows` its heads."""
    special = {**{mark: f"\\{mark}" for mark in "%&_#$"}, "±": r"$\pm$", "^": r"\^{}"}
    lines = []
    for row in rows:
        cells = ("".join(special.get(mark, mark) for mark in cell) for cell in row)
        lines.append(rf"  {' & '.join(cells)} \\")
    begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    head = [begin, r"  \toprule", lines[0], r"  \midrule"]
    return "\n".join([*head, *lines[1:], r"  \bottomrule", r"\end{tabular}", ""])


def spread(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Mean of those that are known, and the standard deviation of the sample where there are two or
    more; None where there is none."""
    known = [value for value in values if value is not None]
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return (statistics.mean(known), deviation) if known else None


def write_csv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write a file of comma-separated values, the first of `rows` their heads."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    replace_file(path, file.getvalue().encode())


def draw_bars(
    axes: Axes,
    rows: Sequence[Sequence[float | None]],
    *,
    ranges: Sequence[Sequence[tuple[float, float] | None]] | None = None,
    marks: Sequence[float | None] = (),
    mark_color: str = DARK,
    colors: Sequence[str] = COLORS,
    inside: bool = False,
) -> None:
    """A bar with its number for each row, from top to bottom, or several below each other, all but
    the first pale; nothing where there is no value. `ranges` are drawn as lines along the bars, and
    a diamond for each row's of `marks`. Numbers stand beyond the ends of bars, or `inside`, where
    marks may be beyond them."""
    longest = 0.0
    for number, values in enumerate(rows):
        height = 0.7 / len(values)
        for part, value in enumerate(values):
            if value is None:
                continue
            y = number + (part - (len(values) - 1) / 2) * height
            color, alpha = colors[number % len(colors)], PALE if part else 1.0
            axes.barh(y, value, height=0.9 * height, color=color, alpha=alpha)
            end, span = value, ranges[number][part] if ranges else None
            if span is not None:
                axes.plot(span, (y, y), color=DARK, marker="|", markersize=5, linewidth=1)
                end = max(value, span[1])
            longest = max(longest, end)
            at, text_color = ((0, y), "white") if inside else ((end, y), "black")
            axes.annotate(short(value), at, (6, 0), color=text_color, **_BESIDE)
    for number, mark in enumerate(marks):
        if mark is not None:
            axes.plot(mark, number, marker="D", linestyle="", color=mark_color, markersize=5)
            longest = max(longest, mark)
    axes.set_xlim(0, (1.05 if inside else _ROOM) * longest or 1)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    tidy(axes, "x")


def short(value: float) -> str:
    """Three or four digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
