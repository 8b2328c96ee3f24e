"""Trains or evaluates a model of a LiBai config; started by tools/train.sh on each process.

python3 tools/train_net.py projects/MagicPrompt/configs/gpt2_training.py [flags] [KEY=VALUE ...]
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# A launcher puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import oneflow_accel

    import libai_projects  # noqa: F401 - says how to install libai
except ImportError as error:
    sys.exit(
        f"{error}. train_net.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )
from oneflow_accel import command, distributed, watchdog
from oneflow_accel.agree import everywhere, require_same
from oneflow_accel.backends import Backend
from oneflow_accel.errors import UserError

from libai.utils.logger import setup_logger
from omegaconf import DictConfig

from flow_train.metrics import console
from libai_projects.command import adapt, check_files, checks, output
from libai_projects.command.arguments import Options, parse_options
from libai_projects.command.config import apply_overrides, load_config
from libai_projects.engine import parts, run

logger = logging.getLogger("libai_projects")

# Objects that hold the graphs of the run, which `_leave` must not free.
_KEPT: list[object] = []
# Seconds that the other processes get to leave before rank 0 where there is no watchdog.
_LET_LEAVE = 1.0


@dataclass(frozen=True)
class Job:
    cfg: DictConfig
    options: Options
    backend: Backend
    adapted: list[str]


def prepare(argv: Sequence[str]) -> Job:
    """Read and check the command line and the config; a UserError is the same on all processes."""

    def read() -> tuple[Options, DictConfig, Backend]:
        options = parse_options(argv)
        cfg = load_config(options.config_file)
        apply_overrides(cfg, options.overrides, options.config_file)
        backend = oneflow_accel.select_device(options.device or cfg.train.dist.get("device_type"))
        cfg.train.dist.device_type = backend.name
        return options, cfg, backend

    options, cfg, backend = everywhere(read)
    require_same(check_files.of_all_machines(cfg, options))
    adapt.complete(cfg)
    adapted = adapt.use_dummy(cfg) if options.dummy else adapt.use_held_out(cfg)
    adapted += adapt.adapt_to_device(cfg, backend)
    if options.profile:
        adapted += adapt.for_profile(cfg, options.profile)
    checks.check_run(cfg, options)
    # The backup of the config says how large the vocabulary is.
    parts.make_tokenizer(cfg)
    return Job(cfg, options, backend, adapted)


def execute(job: Job) -> int:
    """Train or evaluate; the exit code. Raises UserError for what shows only during the run."""
    cfg, options = job.cfg, job.options
    weights, lines = "", []
    if options.eval_only:
        weights = run.weights_to_evaluate(cfg)
        cfg.train.output_dir = str(Path(cfg.train.output_dir) / output.EVALUATION)
    else:
        lines = output.make_room(cfg, resume=options.resume)
    _set_up_log(cfg)
    parts.set_up(cfg, resume=options.resume and not options.eval_only)
    for line in [*lines, *job.adapted]:
        logger.info(line)
    if options.fast_dev_run:
        adapt.shorten(cfg)
    if options.eval_only:
        _KEPT.append(run.evaluate(cfg, job.backend, weights))
        return 0
    try:
        _KEPT.append(run.train(cfg, job.backend, resume=options.resume, profile=options.profile))
    except SystemExit as stop:
        # Told to end, it has written a checkpoint.
        return int(stop.code or 0)
    return 0


class _Line(logging.Formatter):
    """The time, the level above plain information, and the text: which package of ours or LiBai's
    says it does not concern the reader."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s] %(message)s", "%m/%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname}: {record.message}"
        return super().formatMessage(record)


def _set_up_log(cfg: DictConfig) -> None:
    """Send LiBai's log lines and ours to the console and to log.txt, and only to log.txt what LiBai
    prints of all modules and of evaluations, which have a line of ours."""
    # These are the arguments that set_up passes; it then finds the logger set up.
    setup_logger(cfg.train.output_dir, distributed_rank=distributed.rank())
    handlers = logging.getLogger("libai").handlers
    for handler in handlers:
        handler.setFormatter(_Line())
        if getattr(handler, "stream", None) is sys.stdout:
            handler.addFilter(_is_for_console)
    for name in ("libai_projects", "oneflow_accel", console.LINES.name):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = list(handlers), False
        ours.setLevel(logging.INFO)


def _is_for_console(record: logging.LogRecord) -> bool:
    return not (
        record.getMessage().startswith("Model:\n") or record.name.startswith("libai.evaluation")
    )


def main(
    argv: Sequence[str] | None = None,
    program: str = "train_net.py",
    describe: Callable[[DictConfig], list[str]] = lambda _: [],
    smaller: str = "take a smaller train.train_micro_batch_size, train.amp.precision=bfloat16, or "
    "larger train.dist.tensor_parallel_size, train.dist.pipeline_parallel_size",
) -> NoReturn:
    """Entry point; user errors become one line on stderr and a non-zero exit code. `program` is who
    says so, `describe` gives lines for the log by the checked config; `smaller`: command.run."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        _leave(command.run(program, lambda: _run(arguments, describe), smaller))
    # Leave from within the handler: its end would free the graphs that the traceback holds.
    except Exception:
        traceback.print_exc()
        _leave(1)


def _run(argv: Sequence[str], describe: Callable[[DictConfig], list[str]]) -> int:
    job = prepare(argv)
    job.adapted.extend(describe(job.cfg))
    # If a process dies, the others end too and say which one it was.
    with watchdog.guard():
        try:
            code = execute(job)
            # The last that the processes have to do with each other; see `_leave`.
            distributed.settle()
            return code
        except OSError as error:
            text = _in_words(error)
            if text is None:
                raise
            raise UserError(text) from error


def _in_words(error: OSError) -> str | None:
    """What a user can do about an error; None where it is not theirs to mend."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error}: make room, then go on from the last checkpoint with --resume"
    return None


def _leave(code: int) -> NoReturn:
    """End the process.

    One of several frees no graphs, for that waits until the others free theirs. Nor does it wait
    for the others here: rank 0, which serves OneFlow's barriers, must not leave while another still
    waits for the answer to its last one, and the watchdog's goodbyes, which came before, see to it.
    """
    if distributed.world_size() == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    if code == 0 and not watchdog.is_on() and distributed.rank() == 0:
        time.sleep(_LET_LEAVE)
    os._exit(code)


if __name__ == "__main__":
    main()
