"""Where Monarch layers win over dense ones and where they lose, by batch size, as a table and a
picture: `python -m benchmarks.batches PNG`, from the newest file of results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from benchmarks.items import BATCHES
from benchmarks.results import Row
from flow_train import cli
from flow_train.compare.rows import markdown
from flow_train.metrics.curves import new_figure, save_figure


@dataclass(frozen=True)
class Point:
    """One batch size (images, or rows of a layer alone) of one measurement, e.g. "vit-s train": how
    many times the speed of the dense one Monarch has, ours and the peer's (None where it was not
    measured)."""

    what: str
    batch: int
    ours: float
    peer: float | None


def points(rows: Sequence[Row]) -> list[Point]:
    """The points of a file, those for which both the dense and the Monarch item have a figure."""
    by_name = {row.item: row for row in rows if row.group == BATCHES}
    found = []
    for name, dense in by_name.items():
        monarch = by_name.get(name.replace("dense ", "Monarch ", 1))
        if monarch is None or monarch is dense or not (dense.ours_ms and monarch.ours_ms):
            continue
        what, _, batch = name.removeprefix("dense ").partition(", batch ")
        peers = bool(dense.peer_ms and monarch.peer_ms)
        found.append(
            Point(
                what,
                int(batch),
                float(dense.ours_ms) / float(monarch.ours_ms),
                float(dense.peer_ms) / float(monarch.peer_ms) if peers else None,
            )
        )
    return found


def table(found: Sequence[Point]) -> str:
    """Markdown: a line for each measurement, a column for each batch size."""
    batches = sorted({point.batch for point in found})
    rows = [["Monarch over dense, ours (PyTorch)", *map(str, batches)]]
    for what in dict.fromkeys(point.what for point in found):
        cells = {point.batch: _cell(point) for point in found if point.what == what}
        rows.append([what, *(cells.get(batch, "") for batch in batches)])
    return markdown(rows, left=rows[0])


def _cell(point: Point) -> str:
    return f"{point.ours:.2f}" + ("" if point.peer is None else f" ({point.peer:.2f})")


def draw(found: Sequence[Point], title: str, path: Path) -> None:
    """Draw a curve for each measurement, ours solid and the peer's dashed."""
    figure = new_figure(7, 4, "")
    axes = figure.subplots()
    for i, what in enumerate(dict.fromkeys(point.what for point in found)):
        mine = [point for point in found if point.what == what]
        axes.plot([p.batch for p in mine], [p.ours for p in mine], "o-", color=f"C{i}", label=what)
        theirs = [point for point in mine if point.peer is not None]
        axes.plot([p.batch for p in theirs], [p.peer for p in theirs], "x--", color=f"C{i}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=4)
    batches = sorted({point.batch for point in found})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch: images, or rows of one layer 768 -> 3072")
    axes.set_ylabel("speed of Monarch over dense")
    axes.set_title(f"{title}\nsolid: ours, dashed: PyTorch", fontsize=8)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _run() -> None:
    parser = cli.Parser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument("path", type=Path, metavar="PNG", help="the picture to write")
    options = parser.parse_args()
    file = results.last_file()
    rows = results.read(file) if file else []
    found = points(rows)
    if not found:
        raise cli.UserError(
            f"no file of results has rows of the group {BATCHES}: `make bench` makes them"
        )
    print(table(found))
    swept = [row for row in rows if row.group == BATCHES]
    draw(found, results.origin(swept), options.path)


if __name__ == "__main__":
    sys.exit(cli.run("batches", _run))
