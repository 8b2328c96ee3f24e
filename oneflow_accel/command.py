"""How every command ends: with a sentence where a user can mend what was wrong, never a traceback.

sys.exit(command.run("main.py", lambda: train(argv)))
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from oneflow_accel import launched
from oneflow_accel.errors import UserError

# What a shell reports of a process that Ctrl-C ended, and of one whose output nobody reads.
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE


class Parser(argparse.ArgumentParser):
    """Raises what is wrong with a command line instead of ending the process with the usage: one of
    several processes says it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def run(program: str, action: Callable[[], int | None]) -> int:
    """Run what a command does; its exit code.

    Of several processes one on each machine prints the error, and this ends all of them.

    Args:
        program: what messages begin with, such as "main.py".
        action: returns an exit code, None for 0. The text of a KeyboardInterrupt that it raises
            says what there is to go on with.

    Returns:
        What `action` returned; `UserError.EXIT_CODE` after a user's error, INTERRUPTED after
        Ctrl-C, BROKEN_PIPE where whoever read the output has gone, as after `| head`.
    """
    if launched.launched():
        launched.end_with_launcher()
    try:
        code = action() or 0
        # What is still in the buffer may find the reader gone, too.
        sys.stdout.flush()
    except UserError as error:
        return fail(program, str(error))
    except KeyboardInterrupt as interrupt:
        way_on = f"; {interrupt}" if str(interrupt) else ""
        return _end(f"{program}: interrupted{way_on}", INTERRUPTED)
    except BrokenPipeError:
        # Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _end("", BROKEN_PIPE)
    return code


def fail(program: str, text: str) -> int:
    """Say what a user has to mend, and end a job of several processes.

    Returns:
        `UserError.EXIT_CODE`, where this process is the only one.
    """
    # Of ranks other than 0 it is said, for a file may be missing on their machine alone.
    where = f" (process {launched.rank()})" if launched.rank() else ""
    return _end(f"{program}: error{where}: {text}", UserError.EXIT_CODE)


def log_to_stdout() -> None:
    """Send log lines to the standard output, as text."""
    handler = _Handler(sys.stdout)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[handler])


class _Handler(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let the command end where nobody reads it; logging would print a traceback per line."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            raise
        super().handleError(record)


def _end(text: str, code: int) -> int:
    if launched.launched():
        launched.end(text, code)
    if text:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stderr.write(f"{text}\n")
    return code
