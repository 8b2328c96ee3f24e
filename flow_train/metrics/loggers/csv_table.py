"""metrics.csv: what is in metrics.jsonl, as one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from flow_train.files import replace_file
from flow_train.metrics.log import JSONL_NAME, read_metrics
from flow_train.metrics.loggers.base import Logger

CSV_NAME = "metrics.csv"


class CsvTable(Logger):
    """One row per log line: step, split, time, and a column per metric, empty where the line does
    not have it. Written from metrics.jsonl after each validation and at the end, so that a resumed
    run's table is right without further ado.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if split in ("val", "test"):
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        source = self._run_dir / JSONL_NAME
        lines = read_metrics(source) if source.exists() else []
        names: dict[str, None] = {}
        for line in lines:
            names.update(dict.fromkeys(line["values"]))
        text = io.StringIO()
        table = csv.DictWriter(text, ["step", "split", "time", *names], lineterminator="\n")
        table.writeheader()
        for line in lines:
            heads = {key: line.get(key) for key in ("step", "split", "time")}
            table.writerow(heads | line["values"])
        replace_file(self._run_dir / CSV_NAME, text.getvalue().encode())
