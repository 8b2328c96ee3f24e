"""The files in benchmarks/results: one CSV a run, and how two of them compare."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from benchmarks.side_by_side import REPOSITORY
from flow_train.compare.rows import write_csv

FOLDER = REPOSITORY / "benchmarks" / "results"
# A ratio this much below the last file's is a regression.
REGRESSION = 0.10


@dataclass(frozen=True)
class Row:
    """One row of a file; times are milliseconds a step, empty where there is no such figure.

    `ratio` is the throughput of ours over that of `peer`, the fastest of those that were measured
    (over our own where `against` says so), `bar` what it has to reach, `note` what the others
    took, or why a figure is missing; stock OneFlow is without the plug-in.
    """

    date: str
    machine: str
    versions: str
    group: str
    item: str
    ours_ms: str
    peer_ms: str
    ratio: str
    bar: str
    against: str
    stock_ms: str
    stock_ratio: str
    note: str
    peer: str = ""

    @property
    def below_bar(self) -> bool:
        return bool(self.bar) and (not self.ratio or float(self.ratio) < float(self.bar))


def write(path: Path, rows: list[Row]) -> None:
    """Write a file of results."""
    path.parent.mkdir(exist_ok=True)
    write_csv(path, [[field.name for field in fields(Row)], *map(astuple, rows)])


def read(path: Path) -> list[Row]:
    """Read a file of results."""
    with path.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def replaced(rows: list[Row], again: list[Row]) -> list[Row]:
    """The rows, those that were measured again in place of the old ones, and then the new ones."""
    new = {row.item: row for row in again}
    known = {row.item for row in rows}
    return [new.get(row.item, row) for row in rows] + [
        row for row in again if row.item not in known
    ]


def origin(rows: Sequence[Row]) -> str:
    """Where and when rows were measured: machines, versions, and the first and the last date."""
    dates = sorted({row.date for row in rows})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = dict.fromkeys(row.machine for row in rows)
    versions = dict.fromkeys(each for row in rows for each in row.versions.split(", "))
    return f"{', '.join(machines)}; {', '.join(versions)}; {days}"


def last_file() -> Path | None:
    """The newest file; the date that its name begins with decides."""
    files = sorted(FOLDER.glob("*.csv"))
    return files[-1] if files else None


def regressions(rows: list[Row], reference: list[Row]) -> list[tuple[Row, Row]]:
    """The rows whose ratio is more than REGRESSION below that of the reference's row of the same
    name, each with that row."""
    before = {row.item: row for row in reference}
    found = []
    for row in rows:
        old = before.get(row.item)
        if old is None or not old.ratio:
            continue
        if not row.ratio or float(row.ratio) < (1 - REGRESSION) * float(old.ratio):
            found.append((row, old))
    return found
