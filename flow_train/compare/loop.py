"""Trains the runs of a study one after the other, and puts them into one table and one picture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from oneflow_accel import command, machine, settings
from oneflow_accel.backends import resolve
from oneflow_accel.errors import UserError

from flow_train.compare.process import OUTPUT, Ended
from flow_train.compare.report import (
    Entry,
    by_row,
    done,
    draw_comparison,
    figures,
    format_page,
    table,
)
from flow_train.compare.results import ended_with_a_test, read_results
from flow_train.compare.rows import latex, write_csv
from flow_train.compare.study import PlannedRun, Study
from flow_train.files import replace_file
from flow_train.metrics.log import JSONL_NAME

# The exit status where some runs have failed.
INCOMPLETE = 1
PAGE, PICTURE = "comparison.md", "comparison.png"
LATEX, CSV = "comparison.tex", "comparison.csv"

Train = Callable[[Sequence[str], Path], Ended]


def compare(
    study: Study, runs: Sequence[PlannedRun], train: Train, module: str, program: str
) -> int:
    """Do what is left of a study and return the exit status. `train` trains with the arguments of
    `module` for a folder; messages call the command `program`. UserError if the study's folder
    cannot be written to, or the device is not there."""
    folder = runs[0].folder.parent
    states: dict[str, str] = {}
    stopped = False
    for run in runs:
        name = run.name
        if stopped or run.finished:
            continue
        if run.source is not None and not run.source.finished:
            states[name] = f"not run: it needs {run.source.name}"
            continue
        device = _device(run)
        if ended_with_a_test(run.folder / JSONL_NAME):
            # The run ended with its test, but this command was stopped before it noted that.
            run.finish(device)
            continue
        # The user can look at what is done so far while the next run trains.
        _report(study, runs, states, folder, module, draws=settings.CURVES.get() != "off")
        place = f"{1 + runs.index(run)} of {len(runs)}, in {run.folder}"
        print(f"{study.name}: {name}, {place}", flush=True)
        with _writing(run.folder):
            ended = train(run.arguments, run.folder)
            if ended.code == 0:
                run.finish(device)
        stopped = ended.told_to_stop
        if stopped and ended.code:
            states[name] = "interrupted"
        elif ended.code:
            states[name] = f"failed: {ended.how}"
    page = _report(study, runs, states, folder, module, draws=True)
    print(f"{page.read_text()}\ntable: {page}", flush=True)
    if stopped:
        sys.stderr.write(f"{program}: interrupted; the same command goes on\n")
        return command.INTERRUPTED
    for name, state in states.items():
        output = folder / name / OUTPUT
        where = f"; what it printed is in {output}" if output.is_file() else ""
        sys.stderr.write(f"{program}: {name} {state}{where}\n")
    return INCOMPLETE if states else 0


def _device(run: PlannedRun) -> str:
    name = resolve(run.device).backend.properties().name
    return f"{name}, {machine.cores()} CPU cores"


def _report(
    study: Study,
    runs: Sequence[PlannedRun],
    states: dict[str, str],
    folder: Path,
    module: str,
    *,
    draws: bool,
) -> Path:
    """Write table and, if it `draws`, picture of what is done so far; returns the table's file."""
    entries = [_entry(run, states) for run in runs]
    groups = by_row(entries).items() if draws else ()
    drawn = {name: found for name, group in groups if (found := done(group))}
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        picture = draw_comparison(drawn, study.title, folder / PICTURE).name if drawn else None
        replace_file(folder / PAGE, format_page(study, entries, picture, module).encode())
        replace_file(folder / LATEX, latex(table(entries)).encode())
        write_csv(folder / CSV, figures(entries))
    return folder / PAGE


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to: {error.strerror or error}; choose another folder with "
            "work_dir=DIR"
        ) from error


def _entry(run: PlannedRun, states: dict[str, str]) -> Entry:
    finished = run.finished
    if not finished:
        return Entry(run, states.get(run.name, "to do"))
    try:
        results = read_results(run.folder / JSONL_NAME)
    except OSError as error:
        return Entry(run, f"its {JSONL_NAME} cannot be read: {error.strerror or error}")
    return Entry(run, "done", results, f"{finished.get('device')}, {finished.get('date')}")
