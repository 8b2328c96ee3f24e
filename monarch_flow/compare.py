"""Trains the runs of a study one after the other, and puts them into one table and one picture.

    python -m monarch_flow.compare mnist-vit datamodule.data_dir=DIR
    python -m monarch_flow.compare STUDY --cfg job
    python -m monarch_flow.compare transforms      # no runs: see expressiveness.py

The same command again does what is left: finished runs are not repeated, an interrupted one goes
on, and a run that fails does not stop the others.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from oneflow_accel import command
from oneflow_accel.errors import UserError

from flow_train.compare import process
from flow_train.compare.loop import Train, compare
from flow_train.compare.study import PlannedRun, Studies, Study, split_arguments
from monarch_flow.command import Command
from monarch_flow.config import COMPOSER, STUDY, check_data_dir

PROGRAM = "monarch_flow.compare"
MODULE = "monarch_flow.train"
_TRAIN = partial(process.train, MODULE)
STUDIES = Studies(COMPOSER, MODULE, check_data_dir, STUDY)

_HELP = """\
usage: python -m monarch_flow.compare STUDY [KEY=VALUE ...]
       python -m monarch_flow.compare transforms [--help]

Trains the runs of a study one after the other, and compares them in one table and one picture:
work_dir/studies/STUDY/comparison.md and comparison.png (work_dir is runs, or RESULT_DIR in the
environment), with the table in LaTeX and the figures of each run in comparison.tex and
comparison.csv. Runs that are done are not repeated, and one that was interrupted goes on.
`transforms` compares structured matrices by themselves, as Fourier and other transforms.

  STUDY                 one of the studies below, or the path of a file such as theirs, in .yaml
  seeds=N,N,...         run each row once with each of these seeds; the table has means and
                        standard deviations (default: the study's, which name none)
  KEY=VALUE             for all runs, as for python -m monarch_flow.train

flags:
  -h, --help            this text
  -c, --cfg job         print what would be run instead of running it
  -cd, --config-dir DIR further options of the groups, such as DIR/experiment/mine.yaml and
                        DIR/study/mine.yaml

studies:
"""


def main(argv: Sequence[str] | None = None, train: Train = _TRAIN) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code."""
    command.log_to_stdout()
    arguments = sys.argv[1:] if argv is None else argv
    return command.run(PROGRAM, lambda: _run(arguments, train))


def _run(argv: Sequence[str], train: Train) -> int:
    if argv[:1] == ["transforms"]:
        # Here, as --help and --cfg do without oneflow.
        from monarch_flow import expressiveness

        return expressiveness.main(argv[1:])
    options = Command(PROGRAM).parse(argv)
    if options.help:
        print(_help(options.config_dir), end="")
        return 0
    study, runs = _prepare(options.overrides, options.config_dir)
    if options.cfg:
        for run in runs:
            print(shlex.join(("python", "-m", MODULE, *run.arguments)))
        return 0
    return compare(study, runs, train, MODULE, PROGRAM)


def _prepare(texts: Sequence[str], config_dir: str | None) -> tuple[Study, list[PlannedRun]]:
    names = [text for text in texts if "=" not in text]
    if len(names) != 1:
        raise UserError(
            f"name one study, not {len(names)}; there are {', '.join(STUDIES.files(config_dir))}"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("it trains in one process at a time; start it without a launcher")
    study = STUDIES.read(names[0], config_dir)
    study, overrides = split_arguments(study, [text for text in texts if "=" in text])
    return study, STUDIES.plan(study, overrides, config_dir)


def _help(config_dir: str | None) -> str:
    known = STUDIES.files(config_dir)
    width = max(map(len, known), default=0)
    return _HELP + "".join(
        f"  {name:{width}}  {STUDIES.read(name, config_dir).title}\n" for name in known
    )


if __name__ == "__main__":
    sys.exit(main())
