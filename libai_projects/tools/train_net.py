"""Trains or evaluates a model of a LiBai config; started by tools/train.sh on each process.

python3 tools/train_net.py --config-file projects/MagicPrompt/configs/gpt2_training.py --help
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# A launcher puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import oneflow_accel
from oneflow_accel.backends import Backend
from oneflow_accel.errors import CheckpointError, UserError
from oneflow_accel.training import distributed, watchdog
from oneflow_accel.training.rng import seed_all

from libai.engine import default_setup
from omegaconf import DictConfig

from libai_projects.engine import adapt, checks, evaluation, output
from libai_projects.engine.arguments import Options, parse_options
from libai_projects.engine.overrides import apply_overrides, load_config
from libai_projects.engine.trainer import Trainer

logger = logging.getLogger("libai_projects")

# What holds the graphs of the run, see _leave.
_KEPT: list[object] = []


@dataclass(frozen=True)
class Job:
    """A run that passed all checks."""

    cfg: DictConfig
    options: Options
    backend: Backend
    adapted: list[str]


def prepare(argv: Sequence[str]) -> Job:
    """Read the command line and the config, and check them.

    Raises:
        UserError: the same on all processes.
    """
    options = parse_options(argv)
    cfg = load_config(options.config_file)
    apply_overrides(cfg, options.overrides, options.config_file)
    backend = oneflow_accel.select_device(options.device or cfg.train.dist.get("device_type"))
    cfg.train.dist.device_type = backend.name
    adapt.complete(cfg)
    adapted = adapt.adapt_to_device(cfg, backend)
    checks.check_run(cfg, options)
    # The backup of the config says how large the vocabulary is.
    Trainer.build_tokenizer(cfg)
    return Job(cfg, options, backend, adapted)


def execute(job: Job) -> object:
    """Train or evaluate.

    Returns:
        What holds the graphs of the run.

    Raises:
        UserError: anything that is the user's to mend and showed only now.
    """
    cfg, options = job.cfg, job.options
    weights = evaluation.weights_to_evaluate(cfg) if options.eval_only else ""
    with output.prepare(cfg, options) as lines:
        default_setup(cfg, argparse.Namespace(resume=options.resume and not options.eval_only))
        _share_log()
        for line in [*lines, *job.adapted]:
            logger.info(line)
        if options.fast_dev_run:
            adapt.shorten(cfg)
        # The same on all processes: tensors that are split draw by their global position.
        seed_all(cfg.train.seed, job.backend)
        if options.eval_only:
            return evaluation.evaluate(cfg, weights)
        trainer = Trainer(cfg)
        trainer.train()
        return trainer


def _share_log() -> None:
    """Send our log lines where LiBai's go; leave its prints of all modules, and of what our
    console line of an evaluation says, to log.txt."""
    handlers = logging.getLogger("libai").handlers
    for handler in handlers:
        if getattr(handler, "stream", None) is sys.stdout:
            handler.addFilter(_is_for_console)
    for name in ("libai_projects", "oneflow_accel"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = list(handlers), False
        ours.setLevel(logging.INFO)


def _is_for_console(record: logging.LogRecord) -> bool:
    return not (
        record.getMessage().startswith(("Model:\n", "Evaluation results for"))
        or record.name.startswith("libai.evaluation")
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point; user errors become one line on stderr and a non-zero exit code."""
    try:
        job = prepare(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        # All processes have found the same.
        _say(str(error), everywhere=False)
        _leave(UserError.EXIT_CODE)
    try:
        # If a process dies, the others end too and say which one it was.
        with watchdog.guard():
            _KEPT.append(execute(job))
    except KeyboardInterrupt:
        _say("interrupted; go on from the last checkpoint with --resume", everywhere=False)
        _leave(130)
    # Left from within the handler: its end would free the graphs that the traceback holds.
    except Exception as error:
        text = _in_words(error)
        if text is None:
            traceback.print_exc()
            _leave(1)
        _say(text, everywhere=not isinstance(error, CheckpointError))
        _leave(UserError.EXIT_CODE)
    _leave(0)


def _in_words(error: Exception) -> str | None:
    """What a user can do about an error; None where it is not theirs to mend."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FloatingPointError):
        text = str(error).splitlines()[0]
        return f"{text} Try a lower optim.lr or a warm-up (train.warmup_ratio)"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error}: make room, then go on from the last checkpoint with --resume"
    return None


def _say(text: str, *, everywhere: bool) -> None:
    """Print an error, on the main process or with the rank on each."""
    if distributed.is_main() or everywhere:
        rank = f"rank {distributed.rank()}: " if distributed.world_size() > 1 and everywhere else ""
        sys.stderr.write(f"train_net.py: error: {rank}{text}\n")


def _leave(code: int) -> NoReturn:
    """End the process.

    One of several that failed does not wait for the others, which may wait for it. Where all went
    well they end at the same time and free no graphs: OneFlow takes a process that has ended for
    lost, and freeing a graph waits until the others free theirs.
    """
    if distributed.world_size() == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    if code == 0:
        distributed.barrier()
    os._exit(code)


if __name__ == "__main__":
    main()
