"""Trains the language models of a study one after the other, and puts them into one table and one
picture, as `python -m monarch_flow.compare` does with those of images.

    python -m libai_projects.compare projects/BERT/study.yaml [KEY=VALUE ...]

A row's `experiment` is a config of tools/train_net.py. The same command again does what is left.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from oneflow_accel import command
from oneflow_accel.errors import UserError

from flow_train.cli import Parser
from flow_train.compare import process
from flow_train.compare.loop import Train, compare
from flow_train.compare.study import PlannedRun, Study, read_study, run_name, split_arguments
from flow_train.files import replace_file
from libai_projects.command.config import apply_overrides, load_config

PROGRAM, MODULE = "libai_projects.compare", "libai_projects.tools.train_net"
# What a run in a folder was started with.
_STARTED = "arguments.json"


def main(argv: Sequence[str] | None = None, train: Train | None = None) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code."""
    command.log_to_stdout()
    parser = Parser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("study", metavar="STUDY.yaml", help="title, overrides, seeds and rows")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="for all runs; seeds=1,2,3 runs each row with each of these",
    )
    parser.add_argument("--output-dir", default="studies", help="its folder gets one for the study")

    def run() -> int:
        options = parser.parse_intermixed_args(argv)
        study, changes = split_arguments(read_study(Path(options.study)), options.changes)
        runs = _plan(study, changes, Path(options.output_dir))
        return compare(study, runs, train or _train, MODULE, PROGRAM)

    return command.run(PROGRAM, run)


def _plan(study: Study, changes: Sequence[str], folder: Path) -> list[PlannedRun]:
    """UserError names the row whose config cannot be, or that was begun with other values."""
    runs = []
    seeds: list[int] | list[None] = study.seeds or [None]
    for row, seed in itertools.product(study.rows, seeds):
        own = folder / study.name / run_name(row.name, seed)
        texts = [*study.overrides, *row.overrides, *changes]
        texts += [] if seed is None else [f"train.seed={seed}"]
        try:
            if row.init_from is not None:
                raise UserError("init_from is for images; here rows start from nothing")
            cfg = apply_overrides(load_config(row.experiment), texts, row.experiment)
            started = process.noted(own / _STARTED)
            if started and started != {"arguments": [row.experiment, *texts]}:
                raise UserError(
                    f"{own} holds a run with other values ({' '.join(started['arguments'])}). "
                    "Remove that folder, or choose another --output-dir"
                )
        except UserError as error:
            raise UserError(f"{row.name}: {error}") from error
        arguments = (row.experiment, *texts, f"train.output_dir={own}", "--resume")
        device = cfg.train.dist.get("device_type")
        runs.append(PlannedRun(row, arguments, own, device, seed=seed))
    return runs


def _train(arguments: Sequence[str], folder: Path) -> process.Ended:
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"arguments": arguments[:-2]})
    replace_file(folder / _STARTED, content.encode())
    return process.train(MODULE, arguments, folder)


if __name__ == "__main__":
    sys.exit(main())
