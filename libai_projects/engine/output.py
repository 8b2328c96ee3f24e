"""The output directory of a run: one run at a time, and no run overwrites an earlier one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import UserError

from omegaconf import DictConfig

from flow_train.checkpoint import libai_files
from flow_train.checkpoint.folders import require_no_other_run
from flow_train.files import take_lock
from libai_projects.engine.arguments import Options

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
    lock: IO[bytes] | None = None

    def hold() -> list[str]:
        nonlocal lock
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = _lock(directory)
            lines = [] if options.resume else _move_aside(directory)
        except OSError as error:
            raise UserError(f"train.output_dir={directory}: {error}") from error
        # A run of another program of this project stays in place, so it must be refused.
        require_no_other_run(directory, libai_files.last(directory) if options.resume else None)
        return lines

    lines = on_rank_0(hold)
    try:
        yield lines
    finally:
        if lock is not None:
            lock.close()


def _lock(directory: Path) -> IO[bytes]:
    """The system gives the lock back when the process ends, however it does."""
    lock = take_lock(directory / _LOCK)
    if lock is None:
        raise UserError(
            f"train.output_dir={directory}: another run is writing there; wait for it, or choose "
            "another directory"
        )
    return lock


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
