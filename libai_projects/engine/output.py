"""The output directory of a run: one run at a time, and no run overwrites an earlier one."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from omegaconf import DictConfig

from flow_train.checkpoint import libai_files
from flow_train.checkpoint.folders import require_no_other_run
from libai_projects.engine.arguments import Options
from libai_projects.engine.checks import agree

_LOCK = ".lock"
EVALUATION = "evaluation"
# The files and folders that a run leaves in its directory.
_OF_A_RUN = (
    "model_*",
    "last_checkpoint",
    "config.yaml*",
    "log.txt*",
    "metrics.json",
    "metrics.jsonl",
    "metrics.csv",
    "wandb",
    "curves.png",
    "tensorboard",
    EVALUATION,
)

logger = logging.getLogger("libai_projects")


@contextmanager
def prepare(cfg: DictConfig, options: Options) -> Iterator[list[str]]:
    """Hold the output directory of a run, on every process; yields lines for the log.

    A new run moves what an earlier one left to OUTPUT_DIR/previous-N. An evaluation writes to
    OUTPUT_DIR/evaluation, which becomes cfg.train.output_dir. Raises UserError where another
    process writes there, or files cannot be moved.
    """
    directory = Path(cfg.train.output_dir)
    if options.eval_only:
        cfg.train.output_dir = str(directory / EVALUATION)
        yield []
        return
    lines: list[str] = []
    problems: list[str] = []
    lock: IO[str] | None = None
    if distributed.is_main():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = _lock(directory)
            if not options.resume:
                lines = _move_aside(directory)
            # A run of another program of this project stays in place, so it must be refused.
            require_no_other_run(directory, libai_files.last(directory) if options.resume else None)
        except UserError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"train.output_dir={directory}: {error}")
    agree(problems)
    try:
        yield lines
    finally:
        if lock is not None:
            lock.close()


def _lock(directory: Path) -> IO[str]:
    """The system gives the lock back when the process ends, however it does."""
    file = (directory / _LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(
            f"train.output_dir={directory}: another run is writing there; wait for it, or choose "
            "another directory"
        ) from error
    except OSError:
        # The file system has no locks.
        pass
    return file


def _move_aside(directory: Path) -> list[str]:
    if not any(path.is_dir() for path in directory.glob("model_*")):
        return []
    number = 1
    while (directory / f"previous-{number}").exists():
        number += 1
    aside = directory / f"previous-{number}"
    aside.mkdir()
    for pattern in _OF_A_RUN:
        for path in sorted(directory.glob(pattern)):
            os.replace(path, aside / path.name)
    return [f"an earlier run was in {directory}: moved to {aside} (--resume goes on with a run)"]
