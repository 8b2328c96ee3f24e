"""Trains the runs of a study one after the other, and puts them into one table and one picture.

    python -m monarch_flow.compare mnist-vit datamodule.data_dir=DIR
    python -m monarch_flow.compare STUDY --cfg job

Runs that are done are not repeated, one that was interrupted goes on, and a run that fails does not
keep the others from being trained: the same command again does what is left.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from oneflow_accel import command
from oneflow_accel.backends import resolve
from oneflow_accel.errors import UserError

from flow_train.files import replace_file
from flow_train.metrics.log import JSONL_NAME
from monarch_flow.command import Command
from monarch_flow.comparison import process
from monarch_flow.comparison.plan import PlannedRun, plan
from monarch_flow.comparison.process import OUTPUT, Ended
from monarch_flow.comparison.results import ended_with_a_test, read_results
from monarch_flow.comparison.study import Study, read_study, studies
from monarch_flow.comparison.table import Entry, format_page

PROGRAM = "monarch_flow.compare"
# Some runs have failed.
INCOMPLETE = 1
PAGE, PICTURE = "comparison.md", "comparison.png"

_HELP = """\
usage: python -m monarch_flow.compare STUDY [KEY=VALUE ...]

Trains the runs of a study one after the other, and compares them in one table and one picture:
work_dir/studies/STUDY/comparison.md and comparison.png (work_dir is runs, or RESULT_DIR in the
environment). Runs that are done are not repeated, and one that was interrupted goes on.

  STUDY                 one of the studies below, or the path of a file such as theirs, in .yaml
  KEY=VALUE             for all runs, as for python -m monarch_flow.train

flags:
  -h, --help            this text
  -c, --cfg job         print what would be run instead of running it
  -cd, --config-dir DIR further options of the groups, such as DIR/experiment/mine.yaml and
                        DIR/study/mine.yaml

studies:
"""

Train = Callable[[Sequence[str], Path], Ended]


def main(argv: Sequence[str] | None = None, train: Train = process.train) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code.

    Args:
        argv: the command line.
        train: trains with the arguments of `monarch_flow.train` for a folder.
    """
    command.log_to_stdout()
    arguments = sys.argv[1:] if argv is None else argv
    return command.run(PROGRAM, lambda: _run(arguments, train))


def _run(argv: Sequence[str], train: Train) -> int:
    options = Command(PROGRAM, vitae_program="").parse(argv)
    if options.help:
        print(_help(options.config_dir), end="")
        return 0
    study, runs = _prepare(options.overrides, options.config_dir)
    if options.cfg:
        for run in runs:
            print(shlex.join(("python", "-m", "monarch_flow.train", *run.arguments)))
        return 0
    return compare(study, runs, train)


def compare(study: Study, runs: Sequence[PlannedRun], train: Train) -> int:
    """Do what is left of a study; the exit status.

    Raises:
        UserError: the study's folder cannot be written to, or the device is not there.
    """
    folder = runs[0].folder.parent
    states: dict[str, str] = {}
    stopped = False
    for run in runs:
        name = run.row.name
        if stopped or run.finished is not None:
            continue
        if run.source is not None and run.source.finished is None:
            states[name] = f"not run: it needs {run.source.row.name}"
            continue
        device = _device(run)
        if ended_with_a_test(run.folder / JSONL_NAME):
            # All but this command came to its end.
            run.finish(device)
            continue
        # What there is by now can be looked at meanwhile.
        _report(study, runs, states, folder)
        _say(f"{study.name}: {name}, {1 + runs.index(run)} of {len(runs)}, in {run.folder}")
        try:
            ended = train(run.arguments, run.folder)
            if ended.code == 0:
                run.finish(device)
        except OSError as error:
            raise UserError(
                f"{run.folder} cannot be written to: {error.strerror or error}; choose another "
                "folder with work_dir=DIR"
            ) from error
        stopped = ended.told_to_stop
        if stopped and ended.code:
            states[name] = "interrupted"
        elif ended.code:
            states[name] = f"failed: {ended.how}"
    page = _report(study, runs, states, folder)
    _say(page.read_text())
    _say(f"table: {page}")
    if stopped:
        sys.stderr.write(f"{PROGRAM}: interrupted; the same command goes on\n")
        return command.INTERRUPTED
    for name, state in states.items():
        output = folder / name / OUTPUT
        where = f"; what it printed is in {output}" if output.is_file() else ""
        sys.stderr.write(f"{PROGRAM}: {name} {state}{where}\n")
    return INCOMPLETE if states else 0


def _prepare(texts: Sequence[str], config_dir: str | None) -> tuple[Study, list[PlannedRun]]:
    names = [text for text in texts if "=" not in text]
    if len(names) != 1:
        raise UserError(
            f"name one study, not {len(names)}; there are {', '.join(studies(config_dir))}"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("it trains in one process at a time; start it without a launcher")
    study = read_study(names[0], config_dir)
    return study, plan(study, [text for text in texts if "=" in text], config_dir)


def _device(run: PlannedRun) -> str:
    name = resolve(run.cfg.trainer.accelerator).backend.properties().name
    return f"{name}, {len(os.sched_getaffinity(0))} CPU cores"


def _report(study: Study, runs: Sequence[PlannedRun], states: dict[str, str], folder: Path) -> Path:
    """Write table and picture of what is done by now; the table's file."""
    from monarch_flow.comparison.picture import draw_comparison

    entries = [_entry(run, states) for run in runs]
    drawn = [(entry.name, entry.results) for entry in entries if entry.results is not None]
    page = folder / PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        picture = draw_comparison(drawn, study.title, folder / PICTURE).name if drawn else None
        replace_file(page, format_page(study, entries, picture).encode())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to: {error.strerror or error}; choose another folder with "
            "work_dir=DIR"
        ) from error
    return page


def _entry(run: PlannedRun, states: dict[str, str]) -> Entry:
    finished = run.finished
    if finished is None:
        return Entry(run, states.get(run.row.name, "to do"))
    try:
        results = read_results(run.folder / JSONL_NAME)
    except OSError as error:
        return Entry(run, f"its {JSONL_NAME} cannot be read: {error.strerror or error}")
    return Entry(run, "done", results, f"{finished.get('device')}, {finished.get('date')}")


def _help(config_dir: str | None) -> str:
    known = studies(config_dir)
    width = max(map(len, known), default=0)
    return _HELP + "".join(
        f"  {name:{width}}  {read_study(name, config_dir).title}\n" for name in known
    )


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
