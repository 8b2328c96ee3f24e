"""Rows in turns, in processes of their own, and their tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from oneflow_accel.errors import UserError

import pytest

from flow_train.compare import process, rows


def test_rows_take_turns() -> None:
    turns: list[str] = []

    def measure(row: str) -> tuple[float, float]:
        turns.append(row)
        return len(turns), -1.0

    found = rows.in_turns("ab", 3, measure)
    assert "".join(turns) == "ababab"
    assert {row: rows.medians(runs) for row, runs in found.items()} == {"a": (3, -1), "b": (4, -1)}


def test_a_function_in_a_process_of_its_own() -> None:
    assert process.call(os.getenv, "COMPARED", environment={"COMPARED": "two words"}) == "two words"


def test_a_process_that_fails_says_why() -> None:
    command = [sys.executable, "-c", "print('figures'); raise SystemExit('no kernel')"]
    with pytest.raises(UserError, match=r"(?s)raise SystemExit.* failed:\nfigures\nno kernel"):
        process.ask(command)


def test_what_a_run_prints_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output.txt"
    ended = process.run(["-c", "print('said'); raise SystemExit(3)"], output)
    assert (ended.how, ended.told_to_stop) == ("exit code 3", False)
    assert output.read_text() == "said\n"
    assert capfd.readouterr().out == ""
    # A study's goes on where an earlier start has ended, and is seen.
    process.train("calendar", ["2026", "11"], tmp_path)
    assert output.read_text().startswith("said\n   November 2026\n")
    assert "November 2026" in capfd.readouterr().out


CELLS = [["row", "time x", "note"], ["naive", "3", ""], ["w/o, flash", "12.5", "slow"]]


def test_markdown() -> None:
    assert rows.markdown(CELLS).splitlines() == [
        "| row | time x | note |",
        "| --- | ---: | ---: |",
        "| naive | 3 |  |",
        "| w/o, flash | 12.5 | slow |",
    ]
    assert rows.markdown(CELLS, left=("row", "note"), padded=True).splitlines() == [
        "| row        | time x | note |",
        "| ---------- | -----: | ---- |",
        "| naive      |      3 |      |",
        "| w/o, flash |   12.5 | slow |",
    ]


def test_a_table_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rows.show("Times", CELLS, left=("row", "note"))
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert [line for line in cells if line] == CELLS[1:]
    assert "Times" in out
