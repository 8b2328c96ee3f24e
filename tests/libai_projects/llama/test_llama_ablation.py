"""pretrain.py --ablate: what each row runs, what is read of it, and what the tables say."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel.errors import DataError, UserError

import pytest

from flow_train.metrics.log import metric_series, read_metrics
from libai_projects.projects.Llama import ablation, diary
from libai_projects.projects.Llama import flags as flag_table

FUSED = {
    "use_flash",
    "use_fused_rope",
    "use_fused_cross_entropy",
    "use_fused_rmsnorm",
    "use_fused_dropout_add_norm",
    "use_fused_swiglu",
    "fused_adamw",
}
PLAIN_ADAMW = FUSED - {"fused_adamw"}
# What is on in a row.
ROWS = {
    ("table1", "use_all"): PLAIN_ADAMW,
    ("table1", "w/o flash"): PLAIN_ADAMW - {"use_flash"},
    ("table1", "fused_adamw"): FUSED,
    ("table2", "naive"): set(),
    ("table2", "w/o fused_adamw"): PLAIN_ADAMW,
    ("table3", "w/o rope"): FUSED - {"use_fused_rope"},
    ("table3", "flash, cross_entropy, fused_adamw"): {
        "use_flash",
        "use_fused_cross_entropy",
        "fused_adamw",
    },
}
USER = ["--preset=tiny", "--batch_size=1", "--gradient_accumulation_steps=2"]
SECONDS = [None, None, 0.9, 0.8, 0.7, 0.5, 0.2, 0.4, 0.3]


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_what_a_row_runs(table: str, row: str) -> None:
    argv = [*USER, "--ablate", table, "--graph=false", "--resume"]
    flags = flag_table.parse(argv)
    found = flag_table.parse(ablation.row_argv(table, row, flags, argv))
    assert {flag for flag in FUSED if getattr(found, flag)} == ROWS[table, row]
    assert (found.batch_size, found.gradient_accumulation_steps) == (1, 2)
    assert found.hidden_size == 128
    assert (found.ablate, found.resume, found.dummy) == ("", False, True)
    assert (found.max_iters, found.log_interval, found.eval_interval) == (15, 1, 0)
    assert found.save_interval > found.max_iters
    assert found.graph == (table == "table3")
    assert Path(found.output_dir).parent == Path(flags.output_dir) / table


def test_what_the_user_typed_counts() -> None:
    argv = ["--max_iters", "40", "--data=some.bin", "--ablate=table2", "--seed=5"]
    found = flag_table.parse(ablation.row_argv("table2", "use_all", flag_table.parse(argv), argv))
    assert (found.max_iters, found.data, found.dummy, found.seed) == (40, "some.bin", False, 5)
    evaluation = "train.evaluation.enabled"
    assert f"{evaluation}=false" in flag_table.overrides(found)
    assert f"{evaluation}=true" in flag_table.overrides(flag_table.parse(argv))


def test_each_row_of_the_diary_has_switches_and_a_folder() -> None:
    for table, rows in diary.TABLES.items():
        without = [row.name for row in rows if ablation.switches(table, row.name) is None]
        assert without == ([] if table == "table1" else ["flash -> sdpa"])
        argv = ["--ablate", table]
        flags = flag_table.parse(argv)
        folders = {ablation.row_argv(table, row.name, flags, argv)[-1] for row in rows}
        assert len(folders) == len(rows)


def write_metrics(
    folder: Path, losses: Sequence[float | None], seconds: Sequence[float | None] = SECONDS
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for step, (loss, second) in enumerate(zip(losses, seconds, strict=False), start=1):
        values = {"loss": loss, "grad_norm": 1.5, "peak_memory_gb": step / 4}
        if second is not None:
            values |= {"step_seconds": second, "mfu": 10 / second}
            values["tokens_per_second"] = 256 / second
        lines.append({"step": step, "split": "train", "time": 0.0, "values": values})
    lines.append({"step": 8, "split": "val", "time": 0.0, "values": {"loss": 1000.0}})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LOSSES = [6.2, 6.1, 6.0, 5.9, 5.8, 5.7, 5.6, 5.5, 5.4]


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    result = ablation.read(write_metrics(tmp_path, LOSSES), 5, 0.5)
    # Iteration 5 of those that count from 0 is the sixth.
    counted = SECONDS[5:]
    figures = result.figures
    assert figures["first"] == 0.5
    assert figures["seconds"] == statistics.median(counted)
    assert figures["mfu"] == pytest.approx(statistics.median(5 / each for each in counted))
    assert figures["tokens_per_second"] == pytest.approx(
        statistics.median(256 / each for each in counted)
    )
    # Without the last line, which comes after a checkpoint.
    assert figures["memory"] == 8 / 4
    assert figures["loss"] == 5.4
    assert result.curves["loss"] == dict(enumerate(LOSSES, start=1))


def test_runs_without_figures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl.*No such file"):
        ablation.read(tmp_path / "metrics.jsonl", 5)
    with pytest.raises(DataError, match="the time of no iteration after the first 5"):
        ablation.read(write_metrics(tmp_path, LOSSES[:5]), 5)


class Runs:
    """A runner that trains nothing: what it was called with, and what rows are to do otherwise."""

    def __init__(self, losses: Mapping[str, Sequence[float | None]] | None = None) -> None:
        self.losses = losses or {}
        self.failing: set[str] = set()
        self.slower: dict[str, float] = {}
        self.rows: list[str] = []
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
        row = output.parent.name
        self.rows.append(row)
        self.environments.append(environment)
        (output.parent / "checkpoints" / "step-00000015").mkdir(parents=True)
        if row in self.failing:
            output.write_text("step 1\nRuntimeError: no kernel\n[some last warning]\n")
            return -6
        factor = (2.0 if row.startswith("naive") else 1.0) * self.slower.get(row, 1.0)
        seconds = [second and factor * second for second in SECONDS]
        write_metrics(output.parent, self.losses.get(row, LOSSES), seconds)
        return 0


def ablate(out: Path, runs: Runs, *more: str, table: str = "table1") -> int:
    argv = [*USER, f"--ablate={table}", f"--output_dir={out}", "--turns=1", *more]
    return ablation.run(flag_table.parse(argv), argv, runs)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of three rows each."""
    for table in ("table1", "table2"):
        rows = [row for row in diary.TABLES[table] if row.name in ("naive", "use_all", "w/o flash")]
        monkeypatch.setitem(diary.TABLES, table, tuple(rows))


def test_the_table_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs()
    assert ablate(tmp_path, runs, table="table3") == 0
    out = capsys.readouterr().out
    text = (tmp_path / "table3.md").read_text()
    assert "tokens per iteration: 256 = 2 gradient accumulation steps" in out
    assert "262,144, which contradicts its own product 16 x 1 x 2 x 2048 = 65,536" in text
    assert "[1/10] naive: running, ETA ?" in out
    assert "[10/10] flash, cross_entropy, fused_adamw: 0.35 s" in out
    with (tmp_path / "table3.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert list(rows) == [row.name for row in diary.TABLES["table3"]]
    assert rows["naive"]["time x"] == "2.00"
    assert rows["naive"]["diary time x"] == f"{5.47 / 3.60:.2f}"
    assert rows["naive"]["diary GB"] == "64.97"
    assert rows["naive"]["diary added GB"] == "32.51"
    assert rows["naive"]["added GB"] == "0.000"
    assert rows["w/o rope"]["last loss"] == "5.4"
    assert rows["w/o swiglu"]["note"] == "diary: error"
    assert rows["flash -> sdpa"]["note"] == "n/a (PyTorch's own operator)"
    assert rows["flash -> sdpa"]["median s"] == ""
    # Each cell of the Markdown is the CSV's.
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(rows["naive"])
    assert cells[2:] == [[cell or "-" for cell in row.values()] for row in rows.values()]
    assert len({len(line) for line in lines}) == 1
    assert (tmp_path / "table3.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.usefixtures("short")
def test_rows_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is three times as slow in the second turn, where a row loses 5 % and one of
    its turns 40 %."""
    runs = Runs()
    runs.slower = {"naive_turn_2": 3, "use_all_turn_2": 3, "without_flash_turn_2": 3}
    runs.slower |= {"without_flash": 1.05, "without_flash_turn_3": 1.4}
    assert ablate(tmp_path, runs, "--turns", "3") == 0
    names = ["naive", "use_all", "without_flash"]
    assert runs.rows == [name + end for end in ("", "_turn_2", "_turn_3") for name in names]
    with (tmp_path / "table1.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert [rows["naive"][name] for name in ("time x", "spread")] == ["2.00", "0.00"]
    assert [rows["w/o flash"][name] for name in ("time x", "spread")] == ["1.05", "0.40"]
    assert [rows["use_all"][name] for name in ("time x", "spread")] == ["1.00", "2.00"]
    out = capsys.readouterr().out
    assert "WARNING: w/o flash: between turns their times vary by more than" in out
    assert "WARNING: w/o flash: " in (tmp_path / "table1.md").read_text()
    # With fewer turns nothing is run again, and there is nothing to compare.
    again = Runs()
    assert ablate(tmp_path, again, "--turns=1") == 0
    assert again.rows == []
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_a_row_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs()
    runs.failing = {"naive"}
    assert ablate(tmp_path, runs) == 1
    assert runs.rows == ["naive", "use_all", "without_flash"]
    words = "naive: was ended by signal 6: RuntimeError: no kernel"
    assert words in capsys.readouterr().out
    assert words in (tmp_path / "table1.md").read_text()
    assert (
        "\nnaive,,,,,,,,,,9.85,18.41,71.32,43.45,3.05,error\n"
        in (tmp_path / "table1.csv").read_text()
    )
    # Only this one is run again.
    again = Runs()
    assert ablate(tmp_path, again) == 0
    assert again.rows == ["naive"]
    runs.failing = {"naive", "use_all", "without_flash"}
    assert ablate(tmp_path / "none", runs) == 1
    assert "measured on nothing" in (tmp_path / "none" / "table1.md").read_text()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("place", "loss", "text"),
    [
        (3, 5.9 * 1.002, "the loss of step 4 is 5.9118, use_all's 5.9"),
        (8, None, "the loss of step 9 is not a finite number"),
        (8, 5.4 * 1.0005, ""),
    ],
)
def test_losses_that_differ(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: int,
    loss: float | None,
    text: str,
) -> None:
    losses = [*LOSSES[:place], loss, *LOSSES[place + 1 :]]
    assert ablate(tmp_path, Runs({"without_flash": losses})) == (1 if text else 0)
    out = capsys.readouterr().out
    assert ("w/o flash: the loss" in out) == bool(text)
    assert text in out
    agrees = "the largest difference is 5.0e-04" in (tmp_path / "table1.md").read_text()
    assert agrees != bool(text)


@pytest.mark.usefixtures("short")
def test_rows_that_are_finished_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablate(tmp_path, Runs()) == 0
    again = Runs()
    assert ablate(tmp_path, again) == 0
    assert again.rows == []
    assert "[2/3] use_all: 0.35 s" in capsys.readouterr().out
    # Other flags, and another table.
    assert ablate(tmp_path, again, "--seed=3") == 0
    assert len(again.rows) == 3
    assert ablate(tmp_path, again, "--seed=3", table="table2") == 0
    assert len(again.rows) == 6
    (tmp_path / "table2" / "use_all" / "metrics.jsonl").unlink()
    (tmp_path / "table2" / "naive" / "row.json").write_text("[")
    assert ablate(tmp_path, again, "--seed=3", table="table2") == 0
    assert again.rows[6:] == ["naive", "use_all"]


@pytest.mark.usefixtures("short")
def test_what_the_environment_switches_off_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEFLOW_ACCEL_DISABLE", "rope")
    runs = Runs()
    assert ablate(tmp_path, runs, "--disable=swiglu") == 0
    assert all("ONEFLOW_ACCEL_DISABLE" not in each for each in runs.environments)
    # All rows have the peak of one measurement.
    assert {each["FLOW_TRAIN_PEAK"] for each in runs.environments} == {"0.1"}
    out = capsys.readouterr().out
    assert "switched off in each row, by --disable: swiglu" in out
    assert "ONEFLOW_ACCEL_DISABLE=rope does not count in the rows" in out


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--max_iters=5", "at least 6"),
        ("--use_flash=false", "leave them out: --use_flash"),
    ],
)
def test_flags_that_the_rows_set(tmp_path: Path, flag: str, text: str) -> None:
    runs = Runs()
    with pytest.raises(UserError, match=text):
        ablate(tmp_path, runs, flag)
    assert not runs.rows


def test_two_rows_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in diary.TABLES["table2"] if row.name in ("use_all", "w/o rope")]
    monkeypatch.setitem(diary.TABLES, "table2", tuple(rows))
    argv = [*USER, "--ablate=table2", "--max_iters=6", "--turns=1", f"--output_dir={tmp_path}"]
    assert ablation.run(flag_table.parse(argv), argv) == 0
    curves = []
    for folder in ("use_all", "without_rope"):
        lines = read_metrics(tmp_path / "table2" / folder / "metrics.jsonl")
        steps, losses = metric_series(lines, "train", "loss")
        assert steps.tolist() == [1, 2, 3, 4, 5, 6]
        curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    words = (tmp_path / "table2" / "without_rope" / "output.txt").read_text()
    assert "switched off: rope" in words
    assert "switched off" not in (tmp_path / "table2" / "use_all" / "output.txt").read_text()
    text = (tmp_path / "table2.md").read_text()
    assert "\n| use_all " in text
    assert "\n| w/o rope " in text
    assert "oneflow 0.9.0" in text
    assert {"table2.csv", "table2.png"} <= {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.rglob("step-*"))
